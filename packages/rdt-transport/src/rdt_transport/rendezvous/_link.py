"""A client's side of its connection, whatever carries it: calls that wait, events that come.

Calls may be made from any thread; each waits for its own answer. The connection is the client's
identity, so it is never reopened: once it is lost, every call raises.
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from rdt_transport.errors import RdtTransportError, RendezvousError, RendezvousTimeoutError
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.events import ConnectionLost, PushedEvent
from rdt_transport.rendezvous.protocol import MAX_TIMEOUT_SECONDS
from rdt_transport.rendezvous.requests import Request

__all__ = ["GRACE_SECONDS", "Link", "Listen"]

_logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0  # the server ends waits itself, and says what is missing; this is for silence

Listen = Callable[[PushedEvent | ConnectionLost], None]


class Link(ABC):
    """What both kinds do alike.

    Attributes:
        num_messages: calls, their answers, and events so far; heartbeats do not count.
    """

    def __init__(self, address: RendezvousAddress, on_event: Listen | None) -> None:
        self.num_messages = 0
        self._address = address
        self._on_event = on_event
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = count(1)
        self._ended: RdtTransportError | None = None
        self._lease_seconds = 0.0
        self._events: queue.SimpleQueue[PushedEvent | ConnectionLost | None] = queue.SimpleQueue()
        self._event_thread = threading.Thread(target=self._deliver, name="rdt-events", daemon=True)

    @abstractmethod
    def _send(self, number: int, request: Request, timeout_seconds: float) -> None:
        """Bring a call on its way."""

    @abstractmethod
    def _shut(self) -> None:
        """Let go of the server, once every call has ended; the last event is then put."""

    def call(self, request: Request, timeout_seconds: float) -> Any:
        """Ask and wait. Raises the server's refusal, or `RendezvousLostError`."""
        timeout_seconds = min(max(timeout_seconds, 0.0), MAX_TIMEOUT_SECONDS)
        number = next(self._numbers)
        answer: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise _copy(self._ended)
            self._calls[number] = answer
            self.num_messages += 1
        # A server may be slow for a lease; one that is silent for longer ends the connection.
        patience_seconds = timeout_seconds + self._lease_seconds + GRACE_SECONDS
        try:
            self._send(number, request, timeout_seconds)
            return self._read(request, answer.result(patience_seconds))
        except TimeoutError as error:
            if answer.done():
                raise
            raise RendezvousTimeoutError(
                f"the rendezvous at {self._address} gave no answer to {type(request).__name__} "
                f"within {patience_seconds:g} s; look at the log of its host"
            ) from error
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _read(self, request: Request, given: Any) -> Any:
        """The answer to ``request``, as it was given; may raise what it says."""
        return given

    def close(self) -> None:
        """Close the connection; calls in other threads raise. Idempotent."""
        self._end(RendezvousError("this client of the rendezvous is closed"))
        self._join(self._event_thread)

    def _answer(self, number: int) -> Future[Any] | None:
        """The call of that number, which is answered now; None when its caller has given up."""
        with self._lock:
            self.num_messages += 1
            return self._calls.pop(number, None)

    def _tell(self, event: PushedEvent) -> None:
        with self._lock:
            self.num_messages += 1
        self._events.put(event)

    def _end(self, error: RdtTransportError) -> bool:
        """Let ``error`` end every call, now and later; True the first time."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = error
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.set_exception(_copy(error))
        self._shut()
        return True

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a daemon that may be held up by a listener, or by the resolver of names."""
        if thread is threading.current_thread():
            return
        thread.join(GRACE_SECONDS)
        if thread.is_alive():
            _logger.warning(
                "%s of the client of %s has not ended within %g s: a listener, or the resolving of "
                "a name, may still run",
                thread.name,
                self._address,
                GRACE_SECONDS,
            )

    # ---- the event thread --------------------------------------------------------------------

    def _deliver(self) -> None:
        while (event := self._events.get()) is not None:
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    _logger.exception("a listener of the rendezvous failed at %r", event)


def _copy(error: RdtTransportError) -> RdtTransportError:
    """An error raised in several threads must not share its traceback."""
    return type(error)(str(error))
