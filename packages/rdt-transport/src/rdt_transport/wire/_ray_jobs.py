"""Calls of Ray that block, made one after another on a thread of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Jobs"]

_Result = TypeVar("_Result")


class Jobs:
    """Runs jobs on one thread, and what follows each on the thread that polls.

    A daemon thread: a job that hangs ends with the process. Those of ``concurrent.futures`` are
    joined when the interpreter exits, so it would hold that up.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._then: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(
        self, job: Callable[[], _Result], then: Callable[["Future[_Result]"], None] | None = None
    ) -> "Future[_Result]":
        """Have ``job`` run after those before; `poll` calls ``then`` with its outcome."""
        future: Future[_Result] = Future()
        self._then[future] = then or (lambda _: None)
        self._jobs.put((job, future))
        return future

    def poll(self) -> None:
        """Call what follows the jobs that have ended; returns at once."""
        for future in [each for each in self._then if each.done()]:
            self._then.pop(future)(future)

    def close(self, timeout_seconds: float) -> bool:
        """Begin no more jobs; True if the last one ended in time. Nothing follows them any more."""
        for future in self._then:
            future.cancel()
        self._jobs.put(None)
        drained = not wait(self._then, timeout_seconds).not_done
        self._then.clear()
        if drained:
            self._thread.join()
        return drained

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del item, job, future  # no outcome is kept until the next one
