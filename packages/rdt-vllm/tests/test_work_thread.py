import threading

import pytest

from rdt_vllm.errors import LifecycleError, ThreadTimeoutError
from rdt_vllm.work_thread import WorkThread

TIMEOUT_SECONDS = 30.0


def test_items_are_worked_on_in_order_on_one_named_thread() -> None:
    seen: list[tuple[int, str]] = []
    worker = WorkThread[int]("w", lambda item: seen.append((item, threading.current_thread().name)))

    for item in range(100):
        worker.put(item)
    worker.drain(TIMEOUT_SECONDS)

    assert seen == [(item, "w") for item in range(100)]
    worker.close(TIMEOUT_SECONDS)


def test_the_thread_begins_once_before_its_first_item() -> None:
    seen: list[object] = []
    worker = WorkThread[object](
        "w", seen.append, lambda: seen.append(threading.current_thread().name)
    )
    for item in (1, 2):
        worker.put(item)
    worker.close(TIMEOUT_SECONDS)

    assert seen == ["w", 1, 2]


def test_the_thread_starts_with_the_first_item_and_ends_with_close() -> None:
    worker = WorkThread[int]("lazy", lambda item: None)
    worker.drain(0)
    assert "lazy" not in [thread.name for thread in threading.enumerate()]

    worker.put(1)
    assert "lazy" in [thread.name for thread in threading.enumerate()]
    worker.close(TIMEOUT_SECONDS)
    worker.close(TIMEOUT_SECONDS)

    assert "lazy" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(LifecycleError, match="lazy is closed"):
        worker.put(2)


def test_drain_waits_for_the_item_in_hand_and_has_a_deadline() -> None:
    resume = threading.Event()

    def dawdle(item: int) -> None:
        resume.wait(TIMEOUT_SECONDS)

    worker = WorkThread[int]("slow", dawdle)
    worker.put(1)
    worker.put(2)

    with pytest.raises(ThreadTimeoutError, match="slow still has 2 items"):
        worker.drain(0.05)
    with pytest.raises(ThreadTimeoutError, match="slow did not end"):
        worker.close(0.05)

    resume.set()
    worker.drain(TIMEOUT_SECONDS)
    worker.close(TIMEOUT_SECONDS)


def test_close_works_on_what_is_queued() -> None:
    seen: list[int] = []
    worker = WorkThread[int]("rest", seen.append)
    for item in range(50):
        worker.put(item)

    worker.close(TIMEOUT_SECONDS)

    assert seen == list(range(50))
