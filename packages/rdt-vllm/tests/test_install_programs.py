"""The installer where loaders compute, and the modules that are like no other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rdt_bake
from rdt_plan import ConsumerId, Fill, build_plan
from rdt_plan.program import Statement
from rdt_vllm._vllm import VllmConfig, is_deferred
from rdt_vllm.errors import InstallError, UnsupportedError
from rdt_vllm.probe import Probe
from rdt_vllm.recording import record_model
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.install_worker import Answers, InstallWorker, pack_chunk, structure
from rdt_vllm.testing.single_worker import single_worker
from rdt_vllm.testing.tiny_models import TINY_FALCON_H1, TINY_QWEN3
from rdt_vllm.units import InstallUnits
from rdt_vllm.view_buffers import find_view_buffers

pytestmark = pytest.mark.engine

TIMEOUT_SECONDS = 60.0
CPU = torch.device("cpu")
MIXER = "model.layers.1.mamba.mamba"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[VllmConfig]:
    with single_worker(write_checkpoint(TINY_FALCON_H1.build(0), tmp_path / "0")) as config:
        yield config


def test_a_program_that_fails_fails_the_sync_by_name(config: VllmConfig, tmp_path: Path) -> None:
    first, second = (write_checkpoint(TINY_FALCON_H1.build(s), tmp_path / str(s)) for s in (1, 2))
    worker = InstallWorker(config, first)
    before, plan = structure(worker.model), worker.plan
    broken = replace(
        plan,
        programs=tuple(
            replace(p, statements=(*p.statements, Statement("aten.neg.default", (), (), ())))
            if p.module == MIXER
            else p
            for p in plan.programs
        ),
    )
    installer = worker.install(broken)
    weights = load_file(second / "model.safetensors")
    answers = Answers()
    installer.begin(answers)
    for chunk in plan.chunks:
        installer.install(chunk, pack_chunk(chunk, weights))
    with pytest.raises(InstallError, match=rf"{MIXER}: statement \d+ \(aten.neg.default\)"):
        installer.finish(TIMEOUT_SECONDS)

    assert len(answers.errors) == 1
    answered = sorted(answers.scattered_chunks + answers.failed_chunks)
    assert answered == list(range(len(plan.chunks)))
    installer.abandon(RuntimeError("given up"), TIMEOUT_SECONDS)
    assert installer.touched
    assert structure(worker.model) == before
    installer.close(TIMEOUT_SECONDS)
    worker.sync(second)
    assert worker.differences(second) == []
    worker.installer.close(TIMEOUT_SECONDS)


def test_a_sync_given_up_between_inputs_and_program_is_healed(
    config: VllmConfig, tmp_path: Path
) -> None:
    first, second = (write_checkpoint(TINY_FALCON_H1.build(s), tmp_path / str(s)) for s in (1, 2))
    worker = InstallWorker(config, first, max_chunk_bytes=4096)
    before = structure(worker.model)
    weights = load_file(second / "model.safetensors")
    ends = next(chunk.index for chunk in worker.plan.chunks if MIXER in chunk.complete)
    begins = next(chunk.index for chunk in worker.plan.chunks if MIXER in chunk.materialize)
    assert begins < ends
    worker.installer.begin(Answers())
    for chunk in worker.plan.chunks[:ends]:
        worker.installer.install(chunk, pack_chunk(chunk, weights))

    worker.installer.abandon(RuntimeError("given up"), TIMEOUT_SECONDS)

    assert structure(worker.model) == before
    worker.sync(second)
    assert worker.differences(second) == []
    worker.installer.close(TIMEOUT_SECONDS)


def test_a_buffer_that_shows_nothing_known_is_refused(config: VllmConfig, tmp_path: Path) -> None:
    fresh = FreshModel(config, CPU, str(tmp_path / "0"))
    mixer: Any = fresh.model.get_submodule(MIXER)
    (shared,) = [view for view in find_view_buffers(fresh.model, ()) if view.owner is mixer]
    assert (shared.module, shared.param, shared.is_shared) == (mixer.conv1d, "weight", True)
    fresh.post_process()
    (packed,) = [view for view in find_view_buffers(fresh.model, ()) if view.owner is mixer]
    assert (packed.module, packed.param, packed.is_shared) == (mixer.conv1d, "weight", False)
    mixer.register_buffer("made_later", torch.zeros(7), persistent=False)
    with pytest.raises(UnsupportedError, match=rf"{MIXER}\.made_later .*0 parameters"):
        find_view_buffers(fresh.model, {MIXER})
    assert "made_later" not in {view.name for view in find_view_buffers(fresh.model, ())}


def test_a_weight_of_attention_lands_and_stays(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    folder = write_checkpoint(TINY_QWEN3.build(1), tmp_path / "1")
    with single_worker(folder) as config:
        worker = InstallWorker(config, folder)
        path = "model.layers.0.self_attn.attn"
        attention: Any = worker.model.get_submodule(path)
        assert is_deferred(attention)
        attention.sink = nn.Parameter(torch.zeros(4), requires_grad=False)
        sink = attention.sink
        record_metadata_for_reloading(attention)
        fills = [Fill(path, "sink", at, (2,), (1,), "float32", at + 1.5) for at in (0, 2)]
        recording = replace(worker.recording, writes=(*worker.recording.writes, *fills))
        plan = build_plan(worker.manifest, recording.writes, ConsumerId(0, 0), num_workers=1)
        worker.units = InstallUnits(worker.model, recording, Probe(worker.model, config))
        installer = worker.install(plan)
        installer.begin(Answers())
        weights = load_file(folder / "model.safetensors")
        for chunk in plan.chunks:
            installer.install(chunk, pack_chunk(chunk, weights))
        installer.finish(TIMEOUT_SECONDS)
        assert attention.sink is sink
        assert sink.tolist() == [1.5, 1.5, 3.5, 3.5]
        installer.close(TIMEOUT_SECONDS)
        worker.installer.close(TIMEOUT_SECONDS)


def test_what_the_own_checkpoint_never_loads_is_kept_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(TINY_QWEN3.build(1), tmp_path / "1")
    weights = load_file(folder / "model.safetensors")
    lacking = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    with single_worker(folder) as config:
        worker = InstallWorker(config, folder)
        params = tuple(p for p in worker.manifest.params if p.name != "lm_head.weight")
        with pytest.raises(rdt_bake.CoverageError, match=r"lm_head\.weight"):
            record_model(worker.model, params, config)  # its checkpoint has it: a trainer's mistake

        write_weights(lacking.items(), folder)
        recording = record_model(worker.model, params, config)

        assert [each.module for each in recording.uncovered] == ["lm_head"]
        assert "1 parameters keep the values that they have" in caplog.text
        assert "lm_head.weight" in caplog.text
        config.load_config.load_format = "dummy"
        with pytest.raises(rdt_bake.CoverageError, match=r"lm_head\.weight"):
            record_model(worker.model, params, config)
        worker.installer.close(TIMEOUT_SECONDS)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("extra", "unconsumed"),
    [
        ({"value_head.weight": EMBEDDING}, ["value_head.*"]),
        ({"v_head.0.weight": EMBEDDING, "v_head.1.bias": "model.norm.weight"}, ["v_*", "other.*"]),
        ({"model.layers.0.mlp.typo.weight": "model.norm.weight"}, ["*.typo.weight"]),
        ({"model.layers.9.input_layernorm.weight": "model.norm.weight"}, ["model.layers.9.*"]),
    ],
)
def test_names_that_need_no_reader_are_withheld_from_loaders_that_refuse_them(
    tmp_path: Path, extra: dict[str, str], unconsumed: list[str]
) -> None:
    folder = write_checkpoint(TINY_QWEN3.build(1), tmp_path / "1")
    with single_worker(folder) as config:
        worker = InstallWorker(config, folder)
        known = {param.name: param for param in worker.manifest.params}
        added = [replace(known[like], name=name) for name, like in extra.items()]
        params = (*worker.manifest.params, *added)
        for patterns in ([], ["other.*"], ["*"]):
            with pytest.raises(UnsupportedError, match=r"cannot load the .* weights"):
                record_model(worker.model, params, config, patterns)
        assert record_model(worker.model, params, config, unconsumed) == worker.recording
        lacking = [param for param in params if param.name != EMBEDDING]
        with pytest.raises(rdt_bake.CoverageError, match="embed_tokens"):
            record_model(worker.model, lacking, config, unconsumed)
        worker.installer.close(TIMEOUT_SECONDS)


def test_names_that_need_no_reader_are_read_where_the_loaders_take_them(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY_QWEN3.build(1), tmp_path / "1")
    with single_worker(folder) as config:
        worker = InstallWorker(config, folder)
        params = worker.manifest.params
        assert record_model(worker.model, params, config, ["model.norm.*"]) == worker.recording
        worker.installer.close(TIMEOUT_SECONDS)
