"""A client's connection over TCP: one thread for the socket, one for events.

The connection is the client's lease: it is lost with it.
"""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rdt_transport.errors import (
    RendezvousError,
    RendezvousLostError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
)
from rdt_transport.rendezvous import _link
from rdt_transport.rendezvous._link import Link, Listen
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.events import ConnectionLost
from rdt_transport.rendezvous.messages import decode_answer, decode_event, encode_message
from rdt_transport.rendezvous.protocol import (
    Frame,
    encode_frame,
    error_of,
    introduce,
    read_frame,
)
from rdt_transport.rendezvous.requests import Request

__all__ = ["SocketLink"]


class SocketLink(Link):
    """An open, proved connection. Raises what `introduce` raises, and `RendezvousLostError`."""

    def __init__(
        self, address: RendezvousAddress, on_event: Listen | None, timeout_seconds: float
    ) -> None:
        super().__init__(address, on_event)
        self._heard_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened, timeout_seconds), name="rdt-link", daemon=True
        )
        self._thread.start()
        patience_seconds = timeout_seconds + _link.GRACE_SECONDS  # it ends itself before
        try:
            opened.result(patience_seconds)
        except BaseException as error:
            self._end(RendezvousError("this client of the rendezvous was never opened"))
            self._join(self._thread)
            if isinstance(error, TimeoutError) and not opened.done():
                raise RendezvousTimeoutError(
                    f"the client's thread did not open a connection to the rendezvous at {address} "
                    f"within {patience_seconds:g} s; is this machine overloaded?"
                ) from error
            raise
        self._event_thread.start()

    # ---- any thread --------------------------------------------------------------------------

    def _send(self, number: int, request: Request, timeout_seconds: float) -> None:
        frame = encode_frame(
            {
                "kind": "call",
                "call": number,
                "timeout_seconds": timeout_seconds,
                "request": encode_message(request),
            }
        )
        self._submit(self._write, frame)

    def _read(self, request: Request, given: Frame) -> Any:
        if given["kind"] == "refusal":
            raise error_of(given)
        return decode_answer(request, given.get("value"))

    def close(self) -> None:
        self._end(RendezvousError("this client of the rendezvous is closed"))
        self._join(self._thread)
        super().close()

    def _shut(self) -> None:
        self._submit(self._closing.set)

    def _submit(self, call: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the socket's thread has ended, and every call with it
            self._loop.call_soon_threadsafe(call, *arguments)

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
            match frame := await read_frame(reader, heard=self._heard):
                case {"kind": "heartbeat"}:
                    pass
                case {"kind": "event", "event": body}:
                    self._tell(decode_event(body))
                case {"kind": "answer" | "refusal", "call": int(number)}:
                    if (answer := self._answer(number)) is not None:
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
