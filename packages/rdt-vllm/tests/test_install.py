"""The installer on real vLLM models, without an engine: every byte, address and attribute."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rdt_bake
from rdt_plan import Chunk, ConsumerId, Manifest, ParamMeta, SyncPlan, build_plan
from rdt_transport.events import Event, HostEvents
from rdt_vllm._vllm import VllmConfig, checkpoint_form
from rdt_vllm.errors import InstallError, LifecycleError, ThreadTimeoutError
from rdt_vllm.install import Installer
from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.recording import record_model
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.module_snapshots import ModuleSnapshots
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tensor_comparison import compare_filled, compare_live
from rdt_vllm.testing.tiny_models import (
    TINY_LLAMA,
    TINY_QWEN2,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    TINY_QWEN3_TIED,
    TinyModel,
)

pytestmark = pytest.mark.engine

TINY_LLAMA_TIED = TinyModel("llama-tied", "llama", {"tie_word_embeddings": True})
TINY_PADDED = TinyModel("padded", "llama", {"tie_word_embeddings": False, "vocab_size": 500})
TIMEOUT_SECONDS = 60.0


class Answers:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.scattered_chunks: list[int] = []
        self.failed_chunks: list[int] = []
        self.errors: list[BaseException] = []

    def scattered(self, index: int, event: Event) -> None:
        assert event.query()
        self.scattered_chunks.append(index)

    def scatter_failed(self, index: int, error: BaseException) -> None:
        self.failed_chunks.append(index)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


class Refusal(Exception):
    """What an observer that fails raises."""


def refuse(path: str, module: nn.Module) -> None:
    raise Refusal(path)


class Worker:
    """A served model and the means to sync it, with an in-memory transport."""

    def __init__(
        self,
        config: VllmConfig,
        folder: Path,
        *,
        num_slots: int = 2,
        max_chunk_bytes: int = 1 << 16,
    ) -> None:
        self.config = config
        fresh = FreshModel(config, torch.device("cpu"), str(folder))
        fresh.post_process()
        self.model = fresh.model
        weights = load_file(folder / "model.safetensors")
        params = tuple(
            ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in weights.items()
        )
        self.manifest = Manifest.build(_ordered(params))
        self.recording = record_model(self.model, self.manifest.params, config)
        self.plan: SyncPlan = build_plan(
            self.manifest,
            self.recording.writes,
            ConsumerId(0, 0),
            num_workers=1,
            num_slots=num_slots,
            max_chunk_bytes=max_chunk_bytes,
        )
        self.installer = Installer(
            self.model,
            self.plan,
            vllm_config=config,
            events=HostEvents(),
        )
        self.snapshots = ModuleSnapshots()
        self.installer.observe(self.snapshots.observe)

    def queue(self, weights: Mapping[str, torch.Tensor], corrupt: int | None = None) -> Answers:
        answers = Answers()
        self.installer.begin(answers)
        for chunk in self.plan.chunks:
            packed = pack(chunk, weights)
            self.installer.install(chunk, packed[:-1] if chunk.index == corrupt else packed)
        return answers

    def sync(self, folder: Path) -> Answers:
        self.snapshots.clear()
        answers = self.queue(load_file(folder / "model.safetensors"))
        self.installer.finish(TIMEOUT_SECONDS)
        return answers

    def differences(self, folder: Path) -> list[str]:
        """What differs from a model that loaded ``folder`` with vLLM's own loaders."""
        fresh = FreshModel(self.config, torch.device("cpu"), str(folder))
        filled = compare_filled(fresh.model, self.model, self.snapshots, checkpoint_form)
        assert filled.bytes_compared == filled.bytes_expected or filled.mismatches
        fresh.post_process()
        live = compare_live(fresh.model, self.model)
        found = [str(mismatch) for mismatch in (*filled.mismatches, *live.mismatches)]
        return found + different_outputs(fresh.model, self.model)


def _ordered(params: tuple[ParamMeta, ...]) -> list[ParamMeta]:
    from rdt_plan import group_ordered

    by_name = {param.name: param for param in params}
    return [by_name[name] for name in group_ordered(list(by_name))]


def pack(chunk: Chunk, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    packed = torch.zeros(chunk.serve.num_bytes, dtype=torch.uint8)
    for region, offset in zip(chunk.serve.slices, chunk.serve.offsets, strict=True):
        values = rdt_bake.read_slice(weights[region.name], region).contiguous()
        packed[offset : offset + region.num_bytes] = values.view(-1).view(torch.uint8)
    return packed


def different_outputs(expected: nn.Module, found: nn.Module) -> list[str]:
    """Linear layers and heads whose packed form computes something else than ``expected``'s."""
    others = dict(found.named_modules())
    names = []
    for name, module in expected.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and method is not None:
            sizes = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(module, size) for size in sizes if hasattr(module, size))
            inputs = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
            inputs = inputs.to(torch.bfloat16)
            outputs = [
                each.quant_method.apply(each, inputs, None) for each in (module, others[name])
            ]
            if not torch.equal(*outputs):
                names.append(f"output of {name}")
    return names


def structure(model: nn.Module) -> dict[str, object]:
    """Which tensor objects sit where, in which order, and what else the modules have."""
    return {
        name: (
            [(key, id(value)) for key, value in module._parameters.items()],
            [(key, id(value)) for key, value in module._buffers.items()],
            sorted(module._non_persistent_buffers_set),
            sorted(module.__dict__),
        )
        for name, module in model.named_modules()
    }


def addresses(model: nn.Module) -> dict[str, int]:
    return {
        f"{name}.{key}": tensor.data_ptr()
        for name, module in model.named_modules()
        for key, tensor in own_tensors(module).items()
    }


def checkpoints(tmp_path: Path, tiny: TinyModel, *seeds: int) -> list[Path]:
    return [write_checkpoint(tiny.build(seed), tmp_path / f"seed{seed}") for seed in seeds]


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmConfig]:
    tiny = getattr(request, "param", TINY_QWEN3)
    folder = write_checkpoint(tiny.build(0), tmp_path / "served")
    with single_worker(folder) as config:
        yield config


@pytest.mark.parametrize(
    ("config", "tiny"),
    [
        pytest.param(tiny, tiny, id=tiny.name)
        for tiny in (
            TINY_QWEN3,
            TINY_QWEN3_TIED,
            TINY_QWEN2,
            TINY_LLAMA,
            TINY_LLAMA_TIED,
            TINY_PADDED,
            TINY_QWEN3_MOE,
        )
    ],
    indirect=["config"],
)
def test_syncs_are_exact_and_keep_addresses(
    config: VllmConfig, tiny: TinyModel, tmp_path: Path
) -> None:
    first, second, third = checkpoints(tmp_path, tiny, 1, 2, 3)
    worker = Worker(config, first)
    before, where = structure(worker.model), addresses(worker.model)
    assert worker.differences(second)  # the comparison can fail

    for folder in (second, third):
        answers = worker.sync(folder)

        assert worker.differences(folder) == []
        assert answers.scattered_chunks == [chunk.index for chunk in worker.plan.chunks]
        assert structure(worker.model) == before
        assert addresses(worker.model) == where
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize(("num_slots", "max_chunk_bytes"), [(1, 4096), (3, 1 << 30)])
def test_modules_may_span_chunks_and_chunks_modules(
    config: VllmConfig, tmp_path: Path, num_slots: int, max_chunk_bytes: int
) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = Worker(config, first, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes)

    worker.sync(second)

    assert worker.differences(second) == []
    worker.installer.close(TIMEOUT_SECONDS)


def test_a_flipped_byte_is_seen(config: VllmConfig, tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = Worker(config, first)
    weights = load_file(second / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 7] ^= 1

    worker.queue(weights)
    worker.installer.finish(TIMEOUT_SECONDS)

    assert [line for line in worker.differences(second) if "down_proj" in line]
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize("config", [TINY_LLAMA_TIED], indirect=True)
@pytest.mark.parametrize("where", ["scatter", "post-process", "given up"])
def test_a_failed_sync_leaves_a_whole_model_that_the_next_one_heals(
    config: VllmConfig, tmp_path: Path, where: str
) -> None:
    first, second = checkpoints(tmp_path, TINY_LLAMA_TIED, 1, 2)
    worker = Worker(config, first)
    before = structure(worker.model)
    weights = load_file(second / "model.safetensors")
    middle = len(worker.plan.chunks) // 2
    if where == "scatter":
        answers = worker.queue(weights, corrupt=middle)
        with pytest.raises(InstallError, match=rf"chunk {middle}"):
            worker.installer.finish(TIMEOUT_SECONDS)
    elif where == "post-process":
        worker.installer.observe(refuse)
        answers = worker.queue(weights)
        with pytest.raises(InstallError, match="post-processing") as caught:
            worker.installer.finish(TIMEOUT_SECONDS)
        assert isinstance(caught.value.__cause__, Refusal)
        worker.installer.observe(worker.snapshots.observe)
    else:
        answers = Answers()
        worker.installer.begin(answers)
        for chunk in worker.plan.chunks[:middle]:
            worker.installer.install(chunk, pack(chunk, weights))
        worker.installer.drain(TIMEOUT_SECONDS)

    worker.installer.abandon(RuntimeError("given up"), TIMEOUT_SECONDS)

    assert worker.installer.touched
    assert structure(worker.model) == before
    assert len(answers.errors) == (where != "given up")
    answered = sorted(answers.scattered_chunks + answers.failed_chunks)
    assert answered == list(range(middle if where == "given up" else len(worker.plan.chunks)))
    worker.sync(second)
    assert worker.differences(second) == []
    worker.installer.close(TIMEOUT_SECONDS)


def test_calls_out_of_order_are_refused(config: VllmConfig, tmp_path: Path) -> None:
    (first,) = checkpoints(tmp_path, TINY_QWEN3, 1)
    worker = Worker(config, first)
    worker.installer.begin(Answers())

    with pytest.raises(LifecycleError, match="already open"):
        worker.installer.begin(Answers())

    worker.installer.close(TIMEOUT_SECONDS)
    with pytest.raises(LifecycleError, match="closed"):
        worker.installer.install(worker.plan.chunks[0], torch.zeros(0, dtype=torch.uint8))


def test_slow_post_processing_has_a_deadline_and_holds_no_slot(
    config: VllmConfig, tmp_path: Path
) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = Worker(config, first)
    resume = threading.Event()

    def dawdle(path: str, module: nn.Module) -> None:
        resume.wait(TIMEOUT_SECONDS)

    worker.installer.observe(dawdle)
    answers = worker.queue(load_file(second / "model.safetensors"))

    with pytest.raises(ThreadTimeoutError, match="rdt-post-process"):
        worker.installer.drain(0.2)

    assert answers.scattered_chunks == [chunk.index for chunk in worker.plan.chunks]
    resume.set()
    worker.installer.finish(TIMEOUT_SECONDS)
    worker.installer.close(TIMEOUT_SECONDS)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rdt-")]


@pytest.mark.parametrize("config", [TINY_LLAMA_TIED], indirect=True)
def test_recording_leaves_the_model_as_found(config: VllmConfig, tmp_path: Path) -> None:
    (first,) = checkpoints(tmp_path, TINY_LLAMA_TIED, 1)
    worker = Worker(config, first)  # records
    fresh = FreshModel(config, torch.device("cpu"), str(first))
    fresh.post_process()
    before = structure(fresh.model)
    values = {name: tensor.clone() for name, tensor in fresh.model.state_dict().items()}

    recording = record_model(fresh.model, worker.manifest.params, config)
    with pytest.raises(rdt_bake.CoverageError, match="qkv_proj"):
        record_model(fresh.model, worker.manifest.params[:3], config)

    assert recording == worker.recording
    assert structure(fresh.model) == before
    assert all(torch.equal(values[name], t) for name, t in fresh.model.state_dict().items())
    worker.installer.close(TIMEOUT_SECONDS)
