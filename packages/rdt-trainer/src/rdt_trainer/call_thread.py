"""A thread that makes one call after another, and never keeps the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["CallThread"]

_T = TypeVar("_T")


class CallThread:
    """A daemon thread: a call that hangs ends with the process.

    The threads of ``concurrent.futures`` are joined when the interpreter exits, so a call that
    hangs in one of them would hold up the exit for ever.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Make a call after those that were submitted before; not after `close`."""
        future: Future[_T] = Future()
        self._calls.put((call, future))
        return future

    def close(self, *, wait: bool) -> None:
        """End the thread once its calls are made or cancelled; return then, if ``wait``."""
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, call, future  # nor what they refer to, while there is nothing to do
