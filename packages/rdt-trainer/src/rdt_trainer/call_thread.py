"""A thread that makes one call after another, and never keeps the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

__all__ = ["CallThread"]


class CallThread:
    """A daemon thread: a call that hangs ends with the process.

    The threads of ``concurrent.futures`` are joined when the interpreter exits, so a call that
    hangs in one of them would hold up the exit for ever.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Make a call after those that were submitted before; not after `close`."""
        future: Future[None] = Future()
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
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
