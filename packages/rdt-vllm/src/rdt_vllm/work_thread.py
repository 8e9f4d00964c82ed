"""A named thread that works through a queue, in order."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from rdt_vllm.errors import LifecycleError, ThreadTimeoutError

__all__ = ["WorkThread"]

Item = TypeVar("Item")


class WorkThread(Generic[Item]):
    """Calls ``work`` with each item that is put, on a thread that starts with the first one.

    ``work`` must not raise: it reports errors to whoever put the item. ``begin`` is called once on
    the thread, before.
    """

    def __init__(
        self, name: str, work: Callable[[Item], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self._work = work
        self._begin = begin
        self._items: deque[Item] = deque()
        self._unfinished = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, item: Item) -> None:
        """Queue one item (any thread); raises `LifecycleError` after `close`."""
        with self._changed:
            if self._closed:
                raise LifecycleError(f"thread {self.name} is closed")
            self._items.append(item)
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> None:
        """Wait until everything that was put has been worked on; raises `ThreadTimeoutError`."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._unfinished:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ThreadTimeoutError(
                        f"thread {self.name} still has {self._unfinished} items to work on after "
                        f"{timeout_seconds:g} s; if it is only slow, give a longer timeout_seconds"
                    )
                self._changed.wait(left)

    def close(self, timeout_seconds: float) -> None:
        """Work on what is queued, then end the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            raise ThreadTimeoutError(f"thread {self.name} did not end within {timeout_seconds:g} s")

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                while not self._items:
                    if self._closed:
                        return
                    self._changed.wait()
                item = self._items.popleft()
            try:
                self._work(item)
            finally:
                del item
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()
