"""Calls of Ray that block, made one after another on a thread of their own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["Jobs"]

_Result = TypeVar("_Result")


class Jobs:
    """Runs jobs on one thread, and what follows each on the thread that polls."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._then: dict[Future[Any], Callable[[Future[Any]], None]] = {}

    def run(
        self, job: Callable[[], _Result], then: Callable[["Future[_Result]"], None] | None = None
    ) -> "Future[_Result]":
        """Have ``job`` run after those before; `poll` calls ``then`` with its outcome."""
        future = self._thread.submit(job)
        self._then[future] = then or (lambda _: None)
        return future

    def poll(self) -> None:
        """Call what follows the jobs that have ended; returns at once."""
        for future in [each for each in self._then if each.done()]:
            self._then.pop(future)(future)

    def close(self, timeout_seconds: float) -> bool:
        """Begin no more jobs; True if the last one ended in time. Nothing follows them any more."""
        for future in self._then:
            future.cancel()
        drained = not wait(self._then, timeout_seconds).not_done
        self._then.clear()
        self._thread.shutdown(wait=drained)
        return drained
