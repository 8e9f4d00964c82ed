"""The repairs, on fakes that lose their answers exactly as stock vLLM's executor does."""

import pickle
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_vllm import amendments
from rdt_vllm.amendments import end_open_updates, keep_answers_in_step, refuse_sleep_in_updates

BACKEND = "rdt"


class Process:
    """A worker's process: one request queue in, one answer queue out, calls in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.requests: deque[tuple[Any, ...]] = deque()
        self.answers: deque[tuple[bool, Any]] = deque()
        self.busy = False

    def dequeue(self, timeout: float) -> tuple[bool, Any]:
        while not self.answers:
            if self.busy or not self.requests:
                raise TimeoutError
            method, args = self.requests.popleft()[:2]
            if isinstance(method, bytes):
                self.answers.append((True, pickle.loads(method)(self, *args)))
            elif method == "fail" and self.rank in args:
                self.answers.append((False, f"rank {self.rank} failed"))
            else:
                self.answers.append((True, (self.rank, method, *args)))
        return self.answers.popleft()


class Executor:
    """Stops reading at the first worker that failed, as the multiprocessing executor does."""

    def __init__(self, backend: str | None = BACKEND, num_workers: int = 3) -> None:
        config = None if backend is None else SimpleNamespace(backend=backend)
        self.vllm_config = SimpleNamespace(weight_transfer_config=config)
        self.is_failed = False
        self.futures_queue: deque[Any] = deque()
        self.response_mqs = [Process(rank) for rank in range(num_workers)]
        self.rpc_broadcast_mq = self
        self.num_requests = 0

    def enqueue(self, request: tuple[Any, ...], timeout: float | None = None) -> None:
        self.num_requests += 1
        for process in self.response_mqs:
            process.requests.append(request)

    def collective_rpc(
        self, method: str, timeout: float = 0, args: tuple[Any, ...] = (), non_block: bool = False
    ) -> list[Any]:
        self.enqueue((method, args, {}, None))
        answers = []
        for process in self.response_mqs:
            good, answer = process.dequeue(timeout)
            if not good:
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


@pytest.fixture
def amended(monkeypatch: pytest.MonkeyPatch) -> type[Executor]:
    monkeypatch.setattr(amendments, "RESYNC_SECONDS", 0.05)
    amended = type("Amended", (Executor,), {"collective_rpc": Executor.collective_rpc})
    keep_answers_in_step(amended, BACKEND)
    return amended


def answers_of(method: str, *args: Any) -> list[Any]:
    return [(rank, method, *args) for rank in range(3)]


def test_failing_calls_in_a_row_shift_nothing(amended: Callable[..., Executor]) -> None:
    executor = amended()
    for failing in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"rank {failing[0]} failed"):
                executor.collective_rpc("fail", args=failing)
        assert executor.collective_rpc("good", args=failing) == answers_of("good", *failing)


def test_stock_answers_are_out_of_step_without_the_repair() -> None:
    executor = Executor()
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fail", args=(0,))

    assert executor.collective_rpc("good") != answers_of("good")


def test_a_call_that_timed_out_is_caught_up_with(amended: Callable[..., Executor]) -> None:
    executor = amended()
    executor.response_mqs[1].busy = True
    with pytest.raises(TimeoutError):
        executor.collective_rpc("slow")
    executor.response_mqs[1].busy = False

    assert executor.collective_rpc("good") == answers_of("good")


def test_a_worker_too_busy_to_echo_masks_no_error_and_is_waited_for_by_the_next_call(
    amended: Callable[..., Executor], caplog: pytest.LogCaptureFixture
) -> None:
    executor = amended()
    executor.response_mqs[2].busy = True
    with pytest.raises(RuntimeError, match="rank 0 failed"):
        executor.collective_rpc("fail", args=(0,))
    assert "may be out of step" in caplog.text
    assert "rank 0 failed" in caplog.text

    with pytest.raises(TimeoutError, match=r"worker 2 has not answered .* call again"):
        executor.collective_rpc("good")
    executor.response_mqs[2].busy = False

    assert executor.collective_rpc("good") == answers_of("good")


def test_a_broken_queue_masks_no_error(
    amended: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = amended()
    executor.rpc_broadcast_mq = SimpleNamespace()  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="rank 1 failed"):
        executor.collective_rpc("fail", args=(1,))


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_a_failed_forward_ends_the_engine_and_is_left_alone(
    amended: Callable[..., Executor], method: str
) -> None:
    executor = amended()
    executor.response_mqs[0].busy = True
    with pytest.raises(TimeoutError):
        executor.collective_rpc(method)
    assert executor.num_requests == 1


def test_what_a_future_is_still_to_read_is_not_thrown_away(
    amended: Callable[..., Executor],
) -> None:
    executor = amended()
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fail", args=(0,), non_block=True)
    executor.futures_queue.append("a forward")
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fail", args=(0,))
    assert executor.num_requests == 2


@pytest.mark.parametrize("backend", ["nccl", None])
def test_other_backends_are_left_alone(
    amended: Callable[..., Executor], backend: str | None
) -> None:
    executor = amended(backend)
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fail", args=(0,))
    assert executor.num_requests == 1


def test_a_failed_executor_is_asked_for_nothing(amended: Callable[..., Executor]) -> None:
    executor = amended()
    executor.is_failed = True
    with pytest.raises(RuntimeError):
        executor.collective_rpc("fail", args=(0,))
    assert executor.num_requests == 1


def test_amending_twice_amends_once(amended: Any) -> None:
    once = amended.collective_rpc
    keep_answers_in_step(amended, BACKEND)
    assert amended.collective_rpc is once

    worker = type("Worker", (StockWorker,), dict(vars(StockWorker)))
    end_open_updates(worker)
    before = dict(vars(worker))
    end_open_updates(worker)
    assert dict(vars(worker)) == before


class StockWorker:
    """Refuses as vLLM's worker does."""

    def __init__(self, ours: bool, active: bool) -> None:
        self.weight_transfer_engine = SimpleNamespace(
            gives_up_open_updates=ours, reset_weight_update_target=self._reset
        )
        self._weight_update_active = active
        self.resets = 0

    def _reset(self) -> None:
        self.resets += 1

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("already active")
        self._weight_update_active = True

    def finish_weight_update(self) -> None:
        raise RuntimeError("no commit")

    def sleep(self, level: int = 1) -> int:
        return level

    def wake_up(self, tags: list[str] | None = None) -> list[str] | None:
        return tags


def test_a_worker_that_cannot_detach_is_amended_all_the_same() -> None:
    worker = type("Worker", (StockWorker,), dict(vars(StockWorker)))
    end_open_updates(worker)
    ours, theirs = worker(True, True), worker(False, True)

    ours.start_weight_update()
    assert (ours._weight_update_active, ours.resets) == (True, 1)
    with pytest.raises(RuntimeError, match="already active"):
        theirs.start_weight_update()
    for each in (ours, theirs):
        with pytest.raises(RuntimeError, match="no commit"):
            each.finish_weight_update()
    assert not ours._weight_update_active
    assert theirs._weight_update_active


def test_a_worker_neither_sleeps_in_an_update_nor_begins_one_asleep() -> None:
    worker = type("Worker", (StockWorker,), dict(vars(StockWorker)))
    for _ in range(2):
        end_open_updates(worker)
        refuse_sleep_in_updates(worker)
    ours, theirs = worker(True, True), worker(False, True)

    with pytest.raises(RuntimeError, match="finish the weight update"):
        ours.sleep(level=2)
    assert theirs.sleep(level=2) == 2
    theirs._weight_update_active = ours._weight_update_active = False
    theirs.start_weight_update()

    assert ours.sleep(2) == 2
    for tags in (["kv_cache"], ["weights", "kv_cache"]):
        with pytest.raises(RuntimeError, match="wake it up"):
            ours.start_weight_update()
        assert not ours._weight_update_active
        assert ours.wake_up(tags) == tags
    ours.start_weight_update()
    assert ours._weight_update_active

    ours._weight_update_active = False
    ours.sleep()
    assert ours.wake_up() is None
    ours.start_weight_update()
