"""The installer on real vLLM models, without an engine: every byte, address and attribute."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rdt_bake
from rdt_vllm._vllm import VllmConfig, active_config
from rdt_vllm.errors import InstallError, LifecycleError, ThreadTimeoutError
from rdt_vllm.recording import record_model
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.install_worker import (
    Answers,
    InstallWorker,
    addresses,
    pack_chunk,
    structure,
)
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tiny_models import (
    TINY_DEEPSEEK_V2,
    TINY_FALCON_H1,
    TINY_JAMBA,
    TINY_LLAMA,
    TINY_QWEN2,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    TINY_QWEN3_TIED,
    TinyModel,
)
from rdt_vllm.testing.unpacked import keep_weights_unpacked

pytestmark = pytest.mark.engine

TINY_LLAMA_TIED = TinyModel("llama-tied", "llama", {"tie_word_embeddings": True})
TINY_PADDED = TinyModel("padded", "llama", {"tie_word_embeddings": False, "vocab_size": 500})
TIMEOUT_SECONDS = 60.0


class Refusal(Exception):
    """What an observer that fails raises."""


def refuse(path: str, module: nn.Module) -> None:
    raise Refusal(path)


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
            TINY_JAMBA,
            TINY_FALCON_H1,
        )
    ],
    indirect=["config"],
)
def test_syncs_are_exact_and_keep_addresses(
    config: VllmConfig, tiny: TinyModel, tmp_path: Path
) -> None:
    first, second, third = checkpoints(tmp_path, tiny, 1, 2, 3)
    worker = InstallWorker(config, first)
    before, where = structure(worker.model), addresses(worker.model)
    assert worker.differences(second)  # the comparison can fail

    for folder in (second, third):
        answers = worker.sync(folder)

        assert worker.differences(folder) == []
        assert answers.scattered_chunks == [chunk.index for chunk in worker.plan.chunks]
        assert structure(worker.model) == before
        assert addresses(worker.model) == where
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize(("live", "direct"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(
    ("config", "tiny"),
    [
        pytest.param(tiny, tiny, id=tiny.name)
        for tiny in (TINY_QWEN3_TIED, TINY_QWEN3_MOE, TINY_DEEPSEEK_V2, TINY_FALCON_H1)
    ],
    indirect=["config"],
)
def test_as_on_a_gpu_where_nothing_is_packed(
    config: VllmConfig,
    tiny: TinyModel,
    live: bool,
    direct: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_weights_unpacked(monkeypatch.setattr)
    first, second, third = checkpoints(tmp_path, tiny, 1, 2, 3)
    worker = InstallWorker(config, first, max_chunk_bytes=4096, live=live, direct=direct)
    before, where = structure(worker.model), addresses(worker.model)
    assert {unit.is_live for unit in worker.units.all} == {live}
    computes = bool(worker.plan.programs)
    assert (worker.plan.direct_bytes > 0) == direct
    assert (worker.plan.staged_bytes > 0) == (not direct or computes)

    for folder in (second, third):
        worker.sync(folder)

        assert worker.differences(folder) == []
        assert structure(worker.model) == before
        assert addresses(worker.model) == where
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize("config", [TINY_DEEPSEEK_V2], indirect=True)
def test_the_model_goes_with_a_closed_installer(config: VllmConfig, tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, TINY_DEEPSEEK_V2, 1, 2)
    worker = InstallWorker(config, first)
    worker.sync(second)
    worker.installer.close(TIMEOUT_SECONDS)

    model = weakref.ref(worker.model)
    worker.snapshots.clear()
    del worker
    gc.collect()

    assert model() is None  # nor what is tried, derived or kept of it


@pytest.mark.parametrize("config", [TINY_DEEPSEEK_V2], indirect=True)
@pytest.mark.parametrize("packs", [True, False])
def test_absorbed_matrices_of_latent_attention_follow_where_they_are(
    config: VllmConfig, packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        keep_weights_unpacked(monkeypatch.setattr)
    first, second = checkpoints(tmp_path, TINY_DEEPSEEK_V2, 1, 2)
    worker = InstallWorker(config, first, direct=True)
    path = "model.layers.1.self_attn.mla_attn.mla_attn"

    def absorbed(model: nn.Module) -> list[torch.Tensor]:
        attention = model.get_submodule(path)
        return [attention.get_parameter(name) for name in ("W_UV", "W_UK_T")]

    before = absorbed(worker.model)
    values, where = [t.clone() for t in before], [t.data_ptr() for t in before]
    worker.sync(second)

    fresh = FreshModel(config, torch.device("cpu"), str(second))
    fresh.post_process()
    after = absorbed(worker.model)
    assert all(map(torch.equal, after, absorbed(fresh.model)))
    assert not any(map(torch.equal, after, values))
    assert [tensor.data_ptr() for tensor in after] == where
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize("config", [TINY_QWEN3], indirect=True)
def test_a_sync_of_direct_chunks_alone_wakes_no_thread_and_is_observed(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_weights_unpacked(monkeypatch.setattr)
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = InstallWorker(config, first, direct=True)

    answers = worker.sync(second)

    assert worker.plan.staged_bytes == 0
    assert not answers.scattered_chunks
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rdt-")]
    assert worker.snapshots.num_modules == len(worker.units.of)
    assert worker.differences(second) == []

    worker.installer.observe(refuse)
    worker.queue(load_file(first / "model.safetensors"))
    with pytest.raises(InstallError, match=r"observing .* failed"):
        worker.installer.finish(TIMEOUT_SECONDS)
    worker.installer.close(TIMEOUT_SECONDS)


@pytest.mark.parametrize(("num_slots", "max_chunk_bytes"), [(1, 4096), (3, 1 << 30)])
def test_modules_may_span_chunks_and_chunks_modules(
    config: VllmConfig, tmp_path: Path, num_slots: int, max_chunk_bytes: int
) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = InstallWorker(config, first, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes)

    worker.sync(second)

    assert worker.differences(second) == []
    worker.installer.close(TIMEOUT_SECONDS)


def test_a_flipped_byte_is_seen(config: VllmConfig, tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = InstallWorker(config, first)
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
    worker = InstallWorker(config, first)
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
            worker.installer.install(chunk, pack_chunk(chunk, weights))
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


class Lost:
    """A mark on a device that has failed since."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("where", "kind"), [("before a chunk", RuntimeError), ("copying back", InstallError)]
)
def test_a_device_that_fails_fails_the_sync_at_once(
    config: VllmConfig,
    tmp_path: Path,
    where: str,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = InstallWorker(config, first, live=False)
    before = structure(worker.model)
    if where == "before a chunk":
        worker.installer._retired.add([], Lost())
    else:
        monkeypatch.setattr("rdt_vllm.install.copy_all", lambda pairs: Lost().query())

    answers = worker.queue(load_file(second / "model.safetensors"))
    with pytest.raises(kind, match="illegal memory access"):
        worker.installer.drain(TIMEOUT_SECONDS)

    answered = sorted(answers.scattered_chunks + answers.failed_chunks)
    assert answered == [chunk.index for chunk in worker.plan.chunks]
    monkeypatch.undo()
    worker.installer._retired._waiting.clear()
    worker.installer.abandon(RuntimeError("given up"), TIMEOUT_SECONDS)
    assert structure(worker.model) == before
    worker.installer.close(TIMEOUT_SECONDS)


def test_an_error_that_is_kept_keeps_no_memory(config: VllmConfig, tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, TINY_QWEN3, 1, 2)
    worker = InstallWorker(config, first, live=False)
    filled: list[weakref.ref[torch.Tensor]] = []

    def refuse_late(path: str, module: nn.Module) -> None:
        filled.extend(weakref.ref(each) for each in module._parameters.values() if each is not None)
        if len(filled) > 1:
            raise Refusal(path)

    worker.installer.observe(refuse_late)
    worker.queue(load_file(second / "model.safetensors"))
    with pytest.raises(InstallError) as caught:
        worker.installer.finish(TIMEOUT_SECONDS)
    worker.installer.abandon(caught.value, TIMEOUT_SECONDS)

    assert filled and not [each() for each in filled if each() is not None]
    worker.installer.close(TIMEOUT_SECONDS)


def test_calls_out_of_order_are_refused(config: VllmConfig, tmp_path: Path) -> None:
    (first,) = checkpoints(tmp_path, TINY_QWEN3, 1)
    worker = InstallWorker(config, first)
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
    worker = InstallWorker(config, first)
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
    worker = InstallWorker(config, first)  # records
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


def test_recording_sees_through_what_a_reload_of_vllms_own_leaves_behind(
    config: VllmConfig, tmp_path: Path
) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    first, second, third = checkpoints(tmp_path, TINY_QWEN3, 1, 2, 3)
    worker = InstallWorker(config, first)
    with active_config(config), torch.no_grad():
        initialize_layerwise_reload(worker.model)
        worker.model.load_weights(iter(load_file(second / "model.safetensors").items()))
        finalize_layerwise_reload(worker.model, config.model_config)

    assert record_model(worker.model, worker.manifest.params, config) == worker.recording
    worker.sync(third)
    assert worker.differences(third) == []
    worker.installer.close(TIMEOUT_SECONDS)
