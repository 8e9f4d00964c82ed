"""Syncs that fail, inside a real `vllm.LLM` in this process: what is torn, and what heals it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rdt_plan import ConsumerId
from rdt_transport.errors import RdtTransportError, SyncAbortedError
from rdt_vllm.engine import RdtWeightTransferEngine
from rdt_vllm.errors import (
    AttachedElsewhereError,
    InitInfoError,
    InstallError,
    LifecycleError,
    ThreadTimeoutError,
    WorkerTornError,
)
from rdt_vllm.testing.report import check_exact, greedy_tokens, observe
from rdt_vllm.testing.single_trainer import TIMEOUT_SECONDS, SingleTrainer

pytestmark = pytest.mark.engine


def refuse(path: str, module: torch.nn.Module) -> None:
    raise RuntimeError(f"no more {path}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_worker_whose_rendezvous_died_serves_and_joins_the_next_trainer(
    llm: Any, make_trainer: Callable[..., SingleTrainer], folders: list[Path]
) -> None:
    first = make_trainer()
    first.attach()
    first.send(weights_of(folders[1]))
    first.close()

    llm.start_weight_update()
    with pytest.raises(RdtTransportError, match="initialise the transfer again"):
        llm.update_weights(first.update_info(epoch=2))

    assert greedy_tokens(llm, [1, 2, 3], 2)
    second = make_trainer(job="another")
    second.attach()
    observe(llm)
    second.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


@pytest.mark.parametrize("failure", ["abort", "install", "commit"])
def test_a_failed_sync_tears_and_the_next_one_heals(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
    failure: str,
) -> None:
    trainer = make_trainer()
    trainer.attach()
    trainer.send(weights_of(folders[1]))
    trainer.begin()
    new = weights_of(folders[2])
    if failure == "install":
        engine.observe(refuse)
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(trainer.publish, new, None if failure != "abort" else 2)
        llm.start_weight_update()
        llm.update_weights(trainer.update_info())
        if failure == "abort":
            published.result(TIMEOUT_SECONDS)
            wait_until(lambda: engine.installer is not None and engine.installer.touched)
            trainer.client.fail(trainer.epoch, "the trainer gave up")
            expected: tuple[type[Exception], str] = (SyncAbortedError, "the trainer gave up")
        elif failure == "install":
            expected = (InstallError, "post-processing")
        else:
            published.result(TIMEOUT_SECONDS)
            engine.drain_pending()
            incarnation = engine.consumer_incarnation
            trainer.client.drop(ConsumerId(0, 0), incarnation, "too slow")
            expected = (RdtTransportError, "too slow")
        with pytest.raises(expected[0], match=expected[1]):
            llm.finish_weight_update()
    engine.observe(None)
    trainer.producer.abort(RuntimeError("the sync failed"))

    assert engine.torn
    with pytest.raises(WorkerTornError, match="start a new update"):
        engine.update_weights(trainer.update_info()["update_info"])
    with pytest.raises(WorkerTornError):
        engine.drain_pending()
    if failure != "abort":  # dropped: it must join again
        trainer.attach()
        assert engine.torn
    observe(llm)
    trainer.send(new)
    assert not engine.torn
    assert check_exact(llm, folders[2]).ok


def test_what_is_wrong_in_an_update_is_refused_before_anything_is_touched(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    with pytest.raises(LifecycleError, match="init_weight_transfer_engine"):
        llm.start_weight_update()
    trainer = make_trainer()
    trainer.attach(timeout_seconds=3.0)  # an epoch that has not begun is waited for
    for fields in ({"session": "0" * 32}, {"epoch": 7}):
        llm.start_weight_update()
        with pytest.raises((InitInfoError, RdtTransportError)):
            llm.update_weights(trainer.update_info(**fields))
        assert not engine.torn
    llm.start_weight_update()
    llm.finish_weight_update()  # without an update: nothing happens
    observe(llm)
    trainer.send(weights_of(folders[1]))
    assert check_exact(llm, folders[1]).ok


def test_an_update_or_a_finish_without_a_start_changes_nothing(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    """vLLM refuses it on the way to the engine, and the engine whoever calls it directly."""
    trainer = make_trainer()
    trainer.attach()
    observe(llm)
    trainer.send(weights_of(folders[1]))
    for call in (lambda: llm.update_weights(trainer.update_info()), llm.finish_weight_update):
        with pytest.raises(Exception, match="start_weight_update"):
            call()
    update = trainer.update_info()["update_info"]
    for call in (lambda: engine.update_weights(update), engine.finish_weight_update):
        with pytest.raises(
            LifecycleError, match=r"start_weight_update has not been.* call it first"
        ):
            call()
    assert not engine.torn
    assert check_exact(llm, folders[1]).ok
    observe(llm)
    trainer.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


def test_a_bad_update_after_a_good_sync_tears_nothing(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    trainer = make_trainer()
    trainer.attach()
    trainer.send(weights_of(folders[1]))
    llm.start_weight_update()
    with pytest.raises(ValueError, match="update_info"):
        llm.update_weights({"update_info": {"no such field": 1}})
    llm.start_weight_update()
    assert not engine.torn
    llm.finish_weight_update()


@pytest.mark.parametrize("again", ["attach", "start"])
def test_a_worker_whose_threads_are_late_is_torn_until_a_sync_completes(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    again: str,
) -> None:
    trainer = make_trainer()
    trainer.attach()
    resume = threading.Event()
    engine.observe(lambda path, module: resume.wait(TIMEOUT_SECONDS) and None)
    monkeypatch.setattr(engine, "_timeout_seconds", 0.2)
    trainer.begin()
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(trainer.publish, weights_of(folders[1]))
        llm.start_weight_update()
        llm.update_weights(trainer.update_info())
        published.result(TIMEOUT_SECONDS)
        if again == "start":  # who fails in an epoch that failed anyway is not dropped
            trainer.client.fail(trainer.epoch, "the trainer gave up")
        with pytest.raises((ThreadTimeoutError, SyncAbortedError)):
            llm.finish_weight_update()
    trainer.producer.abort(RuntimeError("the sync failed"))

    assert engine.torn
    if again == "attach":
        monkeypatch.setattr("rdt_vllm.engine.CLOSE_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(LifecycleError, match="still at work"):
            trainer.attach()
    resume.set()
    monkeypatch.undo()
    if again == "attach":
        trainer.attach()
        assert engine.torn
    observe(llm)
    trainer.send(weights_of(folders[2]))
    assert not engine.torn
    assert check_exact(llm, folders[2]).ok


@pytest.mark.parametrize("pulling", [False, True])
def test_an_update_that_its_trainer_left_open_hinders_nobody(
    llm: Any, make_trainer: Callable[..., SingleTrainer], folders: list[Path], pulling: bool
) -> None:
    first, second = make_trainer(), make_trainer(job="another")
    first.attach()
    if pulling:
        first.begin()
    llm.start_weight_update()
    if pulling:
        llm.update_weights(first.update_info())
    with pytest.raises(AttachedElsewhereError):
        second.attach()  # the first one lives

    first.close()

    def attached() -> bool:
        try:
            second.attach()
        except AttachedElsewhereError:
            return False  # the worker has not noticed yet
        return True

    wait_until(attached)
    observe(llm)
    second.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok


def test_an_open_update_may_be_begun_again_and_attached_again_and_shut_down(
    llm: Any,
    engine: RdtWeightTransferEngine,
    make_trainer: Callable[..., SingleTrainer],
    folders: list[Path],
) -> None:
    """As a trainer does whose calls broke between start and finish."""
    trainer = make_trainer()
    trainer.attach()
    trainer.begin()
    llm.start_weight_update()
    llm.update_weights(trainer.update_info())
    llm.start_weight_update()
    with pytest.raises(SyncAbortedError, match="a new update began"):
        trainer.producer.finish(TIMEOUT_SECONDS)

    trainer.attach()
    observe(llm)
    trainer.send(weights_of(folders[1]))
    assert check_exact(llm, folders[1]).ok

    llm.start_weight_update()
    llm.shutdown_weight_transfer_engine()
    assert engine.consumer is None
    trainer.attach()
    observe(llm)
    trainer.send(weights_of(folders[2]))
    assert check_exact(llm, folders[2]).ok
