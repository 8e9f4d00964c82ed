"""A client's connection: one thread for the socket, one for events.

Calls may be made from any thread; each waits for its own answer. The connection is the client's
identity and its lease, so it is never reopened: once it is lost, every call raises.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from rdt_transport.errors import (
    RdtTransportError,
    RendezvousError,
    RendezvousLostError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
)
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.events import ConnectionLost, PushedEvent
from rdt_transport.rendezvous.messages import decode_answer, decode_event, encode_message
from rdt_transport.rendezvous.protocol import (
    MAX_TIMEOUT_SECONDS,
    Frame,
    encode_frame,
    error_of,
    introduce,
    read_frame,
)
from rdt_transport.rendezvous.requests import Request

__all__ = ["Link"]

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10.0  # the server ends waits itself, and says what is missing; this is for silence


def _copy(error: RdtTransportError) -> RdtTransportError:
    """An error raised in several threads must not share its traceback."""
    return type(error)(str(error))


class Link:
    """An open, proved connection. Raises what `introduce` raises, and `RendezvousLostError`.

    Attributes:
        num_messages: calls, their answers, and events so far; heartbeats do not count.
    """

    def __init__(
        self,
        address: RendezvousAddress,
        on_event: Callable[[PushedEvent | ConnectionLost], None] | None,
        timeout_seconds: float,
    ) -> None:
        self._address = address
        self._on_event = on_event
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Frame]] = {}
        self._numbers = count(1)
        self.num_messages = 0
        self._ended: RdtTransportError | None = None
        self._heard_at = 0.0
        self._lease_seconds = 0.0
        self._events: queue.SimpleQueue[PushedEvent | ConnectionLost | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened, timeout_seconds), name="rdt-link", daemon=True
        )
        self._thread.start()
        try:
            opened.result(timeout_seconds + _GRACE_SECONDS)  # it ends itself before
        except BaseException as error:
            self._end(RendezvousError("this client of the rendezvous was never opened"))
            self._join(self._thread)
            if isinstance(error, TimeoutError) and not opened.done():
                raise RendezvousTimeoutError(
                    f"the client's thread did not open a connection to the rendezvous at {address} "
                    f"within {timeout_seconds + _GRACE_SECONDS:g} s; is this machine overloaded?"
                ) from error
            raise
        self._event_thread = threading.Thread(target=self._deliver, name="rdt-events", daemon=True)
        self._event_thread.start()

    # ---- any thread --------------------------------------------------------------------------

    def call(self, request: Request, timeout_seconds: float) -> Any:
        """Ask and wait. Raises the server's refusal, or `RendezvousLostError`."""
        timeout_seconds = min(max(timeout_seconds, 0.0), MAX_TIMEOUT_SECONDS)
        number = next(self._numbers)
        frame = encode_frame(
            {
                "kind": "call",
                "call": number,
                "timeout_seconds": timeout_seconds,
                "request": encode_message(request),
            }
        )
        answer: Future[Frame] = Future()
        with self._lock:
            if self._ended is not None:
                raise _copy(self._ended)
            self._calls[number] = answer
            self.num_messages += 1
            self._loop.call_soon_threadsafe(self._write, frame)
        # A server may be slow for a lease; one that is silent for longer ends the connection.
        patience_seconds = timeout_seconds + self._lease_seconds + _GRACE_SECONDS
        try:
            given = answer.result(patience_seconds)
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
        if given["kind"] == "refusal":
            raise error_of(given)
        return decode_answer(request, given.get("value"))

    def close(self) -> None:
        """Close the connection; calls in other threads raise. Idempotent."""
        self._end(RendezvousError("this client of the rendezvous is closed"))
        for thread in (self._thread, self._event_thread):
            if thread is not threading.current_thread():
                self._join(thread)

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a daemon that may be held up by a listener, or by the resolver of names."""
        thread.join(_GRACE_SECONDS)
        if thread.is_alive():
            _logger.warning(
                "%s of the client of %s has not ended within %g s: a listener, or the resolving of "
                "a name, may still run",
                thread.name,
                self._address,
                _GRACE_SECONDS,
            )

    def _end(self, error: RdtTransportError) -> bool:
        """Let ``error`` end every call, now and later; True the first time."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = error
            calls, self._calls = list(self._calls.values()), {}
            with suppress(RuntimeError):  # the socket's thread has ended
                self._loop.call_soon_threadsafe(self._closing.set)
        for call in calls:
            call.set_exception(_copy(error))
        return True

    # ---- the event thread --------------------------------------------------------------------

    def _deliver(self) -> None:
        while (event := self._events.get()) is not None:
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:
                    _logger.exception("a listener of the rendezvous failed at %r", event)

    # ---- the socket's thread -----------------------------------------------------------------

    def _run(self, opened: Future[None], timeout_seconds: float) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live(opened, timeout_seconds))
        finally:
            self._end(RendezvousLostError("the socket's thread of this client has ended"))
            self._events.put(None)

    async def _open(self, timeout_seconds: float) -> tuple[asyncio.StreamReader, float]:
        address = self._address
        try:
            async with asyncio.timeout(timeout_seconds):
                reader, self._writer = await asyncio.open_connection(address.host, address.port)
                return reader, await introduce(reader, self._writer, address)
        except TimeoutError as error:
            raise RendezvousTimeoutError(
                f"the rendezvous at {address} did not answer within {timeout_seconds:g} s; is the "
                "trainer running, and is the address reachable from here?"
            ) from error
        except OSError as error:
            raise RendezvousLostError(
                f"no rendezvous at {address}: {error}; is the trainer running, and is the address "
                "reachable from here?"
            ) from error

    async def _live(self, opened: Future[None], timeout_seconds: float) -> None:
        try:
            reader, lease_seconds = await self._open(timeout_seconds)
            self._lease_seconds = lease_seconds
        except BaseException as error:
            if self._writer is not None:
                self._writer.close()
            opened.set_exception(error)
            return
        opened.set_result(None)
        assert self._writer is not None
        tasks = [
            asyncio.create_task(self._receive(reader)),
            asyncio.create_task(self._beat(lease_seconds)),
            asyncio.create_task(self._closing.wait()),
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            if (error := task.exception()) is not None:
                self._lost(error)
        self._writer.transport.abort()  # every call has ended: nothing is left to send

    def _lost(self, error: BaseException) -> None:
        """Whatever ends the socket's thread by itself ends the client."""
        reason = f"the connection to the rendezvous at {self._address} is lost: {error}"
        kind = type(error) if isinstance(error, RendezvousError) else RendezvousLostError
        if self._end(kind(reason)):
            self._events.put(ConnectionLost(reason))

    def _write(self, frame: bytes) -> None:
        if self._writer is not None:
            self._writer.write(frame)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            frame = await read_frame(reader, heard=self._heard)
            with self._lock:
                self.num_messages += frame["kind"] != "heartbeat"
            match frame:
                case {"kind": "heartbeat"}:
                    pass
                case {"kind": "event", "event": body}:
                    self._events.put(decode_event(body))
                case {"kind": "answer" | "refusal", "call": int(number)}:
                    with self._lock:
                        answer = self._calls.pop(number, None)
                    if answer is not None:  # its caller may have given up
                        answer.set_result(frame)
                case {"kind": "refusal"}:
                    raise error_of(frame)
                case _:
                    raise RendezvousProtocolError(f"unknown frame {frame['kind']!r:.80}")

    def _heard(self) -> None:
        self._heard_at = self._loop.time()

    async def _beat(self, lease_seconds: float) -> None:
        """Send a heartbeat five times a lease; a server silent for a whole lease is gone."""
        self._heard()
        interval = lease_seconds / 5
        while True:
            slept_at = self._loop.time()
            await asyncio.sleep(interval)
            now = self._loop.time()
            if now - slept_at > 2 * interval:
                self._heard()  # this process was stopped: the server's silence proves nothing
            if now - self._heard_at > lease_seconds:
                raise RendezvousLostError(f"it was silent for {lease_seconds:g} s")
            self._write(encode_frame({"kind": "heartbeat"}))
