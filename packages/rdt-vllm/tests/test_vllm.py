"""The version gate and the seams, against the vLLM that is installed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from torch import nn
from vllm.v1.worker.gpu_worker import Worker

from rdt_vllm import _vllm
from rdt_vllm.errors import VllmVersionError
from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.single_worker import worker_config
from rdt_vllm.testing.tiny_models import TINY_QWEN3

pytestmark = pytest.mark.engine


def test_the_installed_version_passes() -> None:
    _vllm.check_version()


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 28, 1))
    monkeypatch.setattr(vllm, "__version__", "0.28.1")

    with pytest.raises(VllmVersionError, match=r"0\.28\.1 is too old.*upgrade vLLM"):
        _vllm.check_version()


def test_a_version_that_lacks_what_we_build_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import meta

    monkeypatch.delattr(meta, "restore_layer_on_meta")

    with pytest.raises(VllmVersionError, match=r"has no .*meta\.restore_layer_on_meta"):
        _vllm.check_version()


def test_facts_come_from_the_configuration(tmp_path: Path) -> None:
    folder = write_checkpoint(TINY_QWEN3.build(0), tmp_path)
    config = worker_config(folder)
    model = nn.Linear(2, 2)
    assert _vllm.engine_facts(config, model) == _vllm.EngineFacts()

    config.parallel_config.enable_eplb = True
    config.offload_config.uva.cpu_offload_gb = 1.0
    config.speculative_config = SimpleNamespace(method="eagle")  # type: ignore[assignment]
    config.lora_config = SimpleNamespace()  # type: ignore[assignment]
    model.process_weights_after_loading = lambda: print()  # type: ignore[assignment]

    facts = _vllm.engine_facts(config, model)
    assert facts == _vllm.EngineFacts(
        eplb=True, draft_method="eagle", lora=True, offload=True, model_hook=facts.model_hook
    )
    assert facts.model_hook is not None and "by its print" in facts.model_hook
    config.parallel_config = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(VllmVersionError, match="enable_eplb"):
        _vllm.engine_facts(config, model)


class Engine:
    """As much of an engine as the worker touches when updates begin and end."""

    def __init__(self, gives_up_open_updates: bool) -> None:
        self.gives_up_open_updates = gives_up_open_updates
        self.calls: list[str] = []

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def finish_weight_update(self) -> None:
        raise RuntimeError("no commit")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def reset_weight_update_target(self) -> None:
        self.calls.append("reset")


@pytest.fixture
def make_worker(tmp_path: Path) -> Callable[..., Any]:
    """Makes stock workers, amended, without a device or a model."""
    _vllm.amend_worker()
    config = worker_config(write_checkpoint(TINY_QWEN3.build(0), tmp_path))

    def make(ours: bool, update_open: bool) -> Any:
        worker: Any = Worker.__new__(Worker)
        worker.vllm_config = config
        worker.weight_transfer_engine = Engine(ours)
        worker._weight_update_active = update_open
        return worker

    return make


def test_workers_are_amended_once() -> None:
    _vllm.amend_worker()
    wrapped = Worker.finish_weight_update, Worker.start_weight_update
    _vllm.amend_worker()
    assert (Worker.finish_weight_update, Worker.start_weight_update) == wrapped


@pytest.mark.parametrize("ours", [True, False])
def test_a_failed_finish_ends_the_workers_update_for_our_engine_only(
    make_worker: Callable[..., Any], ours: bool
) -> None:
    worker = make_worker(ours, update_open=True)

    with pytest.raises(RuntimeError, match="no commit"):
        worker.finish_weight_update()

    assert worker._weight_update_active is not ours
    assert worker.weight_transfer_engine.calls == ["reset"] * ours


def test_a_half_failed_update_hinders_no_new_one(make_worker: Callable[..., Any]) -> None:
    """One worker's update ended by its error, the other's is open."""
    workers = [make_worker(True, update_open=False), make_worker(True, update_open=True)]

    for worker in workers:
        worker.start_weight_update()

    assert [worker._weight_update_active for worker in workers] == [True, True]
    assert [worker.weight_transfer_engine.calls[-1] for worker in workers] == ["start"] * 2


def test_an_open_update_hinders_no_shutdown(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(True, update_open=True)

    worker.shutdown_weight_transfer_engine()

    assert not worker._weight_update_active
    assert worker.weight_transfer_engine.calls == ["reset", "shutdown"]


def test_another_engines_open_update_is_refused_as_ever(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(False, update_open=True)

    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    with pytest.raises(RuntimeError, match="during a weight update"):
        worker.shutdown_weight_transfer_engine()
    assert worker._weight_update_active
    assert worker.weight_transfer_engine.calls == []
