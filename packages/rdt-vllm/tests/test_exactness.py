"""The probe inside a real vLLM of two workers: it passes what is exact, and nothing else.

The worker's own layerwise reload stands in for a sync here, so that what is tested is the probe.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.report import (
    DEFAULT_PROMPT,
    NotExactError,
    ProbeError,
    ask,
    check_exact,
    greedy_tokens,
    observe,
)
from rdt_vllm.testing.serving import EngineCache, stop_engine
from rdt_vllm.testing.tiny_models import TINY_QWEN2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_WORKERS = 2
RELOAD_PROBE = "rdt_vllm.testing.reload_probe.ReloadProbe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [write_checkpoint(TINY_QWEN2.build(seed), root / str(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def llm(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine for the module, which leaves neither a process nor shared memory."""
    memory = set(os.listdir("/dev/shm"))
    cache = EngineCache(tmp_path_factory.mktemp("engines"))
    arguments = {"weight_transfer_config": None, "worker_extension_cls": RELOAD_PROBE}
    try:
        llm = cache.get(folders[0], NUM_WORKERS, **arguments)
        processes = engine_processes()
        assert len(processes) == 1 + NUM_WORKERS
        assert cache.get(folders[0], NUM_WORKERS, **arguments) is llm
        yield llm
    finally:
        cache.close()
    assert not [process for process in processes if process.is_running()]
    assert not {name for name in set(os.listdir("/dev/shm")) - memory if name.startswith("vllm")}
    stop_engine(llm)  # once more does nothing


def engine_processes() -> list[psutil.Process]:
    return [c for c in psutil.Process().children(recursive=True) if "VLLM" in c.name()]


def reload(llm: Any, folder: Path, leave_out: str = "") -> None:
    ask(llm, "rdt_reload", (str(folder), leave_out))


def test_reloaded_workers_are_exact_and_serve_on(llm: Any, folders: list[Path]) -> None:
    digests = set()
    for folder in (folders[1], folders[2], folders[1]):
        reload(llm, folder)
        tokens = greedy_tokens(llm, DEFAULT_PROMPT, 4)

        report = check_exact(llm, folder)

        assert report.ok, report
        assert [worker.worker for worker in report.workers] == list(range(NUM_WORKERS))
        assert report.tokens == tokens == greedy_tokens(llm, DEFAULT_PROMPT, 4)
        digests.add((folder, report.logits_digest))
    assert len(digests) == 2

    # All of the model, its replicated norms in each worker.
    model = TINY_QWEN2.build(1)
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    norms = sum(size for name, size in sizes.items() if name.endswith("norm.weight"))
    assert report.bytes_compared == sum(sizes.values()) + norms * (NUM_WORKERS - 1)


@pytest.mark.parametrize(
    "flip",
    [
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_one_flipped_byte_fails_tensors_and_logits(
    llm: Any, folders: list[Path], flip: str
) -> None:
    reload(llm, folders[1])

    report = check_exact(llm, folders[1], flip=flip)

    assert not report.ok
    for worker in report.workers:
        tensors = [m for m in worker.mismatches if not m.path.startswith("logits")]
        assert {mismatch.path for mismatch in tensors} == {flip}
        assert tensors[0].first_byte is not None
        assert [m for m in worker.mismatches if m.path.startswith("logits")]
    with pytest.raises(NotExactError, match=flip):
        report.require()
    assert check_exact(llm, folders[1]).ok  # and the worker itself is as it was


@pytest.mark.parametrize("stale", ["model.norm", "model.layers.1.self_attn.o_proj"])
def test_a_stale_module_is_named(llm: Any, folders: list[Path], stale: str) -> None:
    reload(llm, folders[1])
    reload(llm, folders[2], leave_out=stale)

    report = check_exact(llm, folders[2])

    for worker in report.workers:
        assert f"{stale}.weight" in [mismatch.path for mismatch in worker.mismatches]
        assert worker.bytes_compared < worker.bytes_unpacked
        assert [m for m in worker.mismatches if m.path.startswith("logits")]


def test_the_wrong_checkpoint_fails_everywhere(llm: Any, folders: list[Path]) -> None:
    reload(llm, folders[1])

    report = check_exact(llm, folders[2])

    num_parameters = len([*TINY_QWEN2.build(0).parameters()])
    assert len(report.mismatches) > num_parameters / 2
    assert check_exact(llm, folders[1]).ok


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_the_live_model_serves_on(
    llm: Any, folders: list[Path], tmp_path: Path
) -> None:
    reload(llm, folders[1])
    tokens = greedy_tokens(llm, DEFAULT_PROMPT, 4)
    model = TINY_QWEN2.build(1)
    model.model.norm = None

    with pytest.raises(ProbeError, match=r"model\.norm\.weight"):
        check_exact(llm, write_checkpoint(model, tmp_path / "incomplete"))

    assert greedy_tokens(llm, DEFAULT_PROMPT, 4) == tokens
    assert check_exact(llm, folders[1]).ok


def test_an_engine_without_weight_transfer_cannot_be_observed(llm: Any) -> None:
    with pytest.raises(ProbeError, match="no engine to observe"):
        observe(llm)
