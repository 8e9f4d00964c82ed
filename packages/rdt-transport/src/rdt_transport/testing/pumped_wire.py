"""A wire on a thread of its own that keeps polling it: what tests hold in place of a session."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.wire.base import Notification, ReadDone, ReadFailed, Wire

__all__ = ["PumpedWire"]

_Result = TypeVar("_Result")
WireEvent = ReadDone | ReadFailed | Notification


class PumpedWire:
    """Polls a wire every ``poll_seconds`` and keeps every event; closes it at the end of ``with``.

    Args:
        make_wire: makes the wire; called on the thread.
        poll_seconds: how long the thread sleeps between polls.
    """

    TIMEOUT_SECONDS = 60.0

    def __init__(self, make_wire: Callable[[], Wire], poll_seconds: float = 0.001) -> None:
        self._jobs: SimpleQueue[Callable[[Wire], None] | None] = SimpleQueue()
        self._events: list[WireEvent] = []
        self._changed = threading.Condition()
        self._poll_seconds = poll_seconds
        made: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_wire, made), daemon=True)
        self._thread.start()
        self.name = made.result(self.TIMEOUT_SECONDS)

    def __enter__(self) -> "PumpedWire":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def call(self, fn: Callable[[Wire], _Result]) -> _Result:
        """The result of ``fn(wire)``, run on the wire's thread without a poll in between."""
        result: Future[_Result] = Future()

        def run(wire: Wire) -> None:
            try:
                result.set_result(fn(wire))
            except BaseException as error:
                result.set_exception(error)

        self._jobs.put(run)
        return result.result(self.TIMEOUT_SECONDS)

    def take(self, count: int, timeout_seconds: float = 20.0) -> list[WireEvent]:
        """The next ``count`` events, in the order they came; `WireTimeoutError` if fewer come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._events) >= count, timeout_seconds):
                raise WireTimeoutError(
                    f"{self.name}: expected {count} events within {timeout_seconds} s, "
                    f"found {self._events}"
                )
            taken, self._events = self._events[:count], self._events[count:]
            return taken

    def pending(self) -> list[WireEvent]:
        """The events nobody took."""
        with self._changed:
            return list(self._events)

    def stop(self) -> None:
        """Close the wire and end the thread. Idempotent."""
        self._jobs.put(None)
        self._thread.join(self.TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise WireTimeoutError(f"{self.name}: its thread has not ended")

    def _run(self, make_wire: Callable[[], Wire], made: "Future[str]") -> None:
        try:
            wire = make_wire()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(wire.name)
        try:
            while self._run_job(wire):
                with contextlib.suppress(WireError):  # a test may have closed it
                    events = wire.poll()
                    with self._changed:
                        self._events += events
                        self._changed.notify_all()
        finally:
            wire.close()

    def _run_job(self, wire: Wire) -> bool:
        with contextlib.suppress(Empty):
            job = self._jobs.get(timeout=self._poll_seconds)
            if job is None:
                return False
            job(wire)
        return True
