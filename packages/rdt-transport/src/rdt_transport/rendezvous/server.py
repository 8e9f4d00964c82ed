"""The rendezvous as a TCP service: the thin asyncio driver of `JobState`.

Clients of the same process ask without a socket (`LocalLink`).
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

from rdt_plan.records import JobRecord
from rdt_transport.errors import RdtTransportError, RendezvousLostError, RendezvousProtocolError
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.rendezvous.events import Announced
from rdt_transport.rendezvous.messages import (
    AnnouncementWriter,
    decode_request,
    encode_answer,
    encode_message,
)
from rdt_transport.rendezvous.protocol import (
    COMPACT,
    HANDSHAKE_TIMEOUT_SECONDS,
    MAX_FRAME_BYTES,
    MAX_TIMEOUT_SECONDS,
    Frame,
    admit_client,
    encode_frame,
    framed,
    read_frame,
    refusal,
)
from rdt_transport.rendezvous.requests import Request
from rdt_transport.rendezvous.settings import JobSettings
from rdt_transport.rendezvous.state import JobState

__all__ = ["RendezvousServer"]

_logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 4 * MAX_FRAME_BYTES  # unread by one client; it is given up beyond
_FLUSH_SECONDS = 1.0
_CROWD_SECONDS = 0.05  # meeting a newcomer takes longer


class RendezvousServer:
    """Serves one job on the running event loop; every method belongs to that loop.

    Args:
        job: the job's name.
        token: the job's secret.
        settings: what the whole job agrees on.
    """

    def __init__(self, job: str, token: str, settings: JobSettings) -> None:
        self._job = job
        self._token = token
        self._settings = settings
        self._state = JobState(job, settings, lambda: uuid.uuid4().hex)
        self._numbers = count(1)
        self._parties: dict[int, Callable[[Effect], None]] = {}  # clients of this process
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._open: set[asyncio.StreamWriter] = set()  # also those that have not proved the token
        self._announcement = AnnouncementWriter()
        self._announced: dict[int, list[bytes]] = {}  # frames that `_flush` sends
        self._job_told: tuple[JobRecord, str] | None = None  # and its JSON
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on ``host``; returns the port. Raises `OSError` when it cannot be bound."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close every connection; clients see it at once."""
        self._closed = True
        for client, deliver in self._parties.items():
            deliver(Disconnect(client, "it is closed"))
        self._parties.clear()
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [asyncio.create_task(writer.wait_closed()) for writer in self._open]
        if closing:  # a peer that does not read must not keep us
            await asyncio.wait(closing, timeout=_FLUSH_SECONDS)
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*closing, return_exceptions=True)

    # ---- connections -------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by `close`, which waits for the writer
        except Exception:
            _logger.exception("job %s: a connection ends by an error of ours", self._job)
        finally:
            writer.close()
            self._tasks.discard(task)
            if not self._closed:
                self._open.discard(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_SECONDS):
                await admit_client(
                    reader,
                    writer,
                    job=self._job,
                    token=self._token,
                    lease_seconds=self._settings.lease_seconds,
                )
        except RendezvousLostError:
            return
        except TimeoutError:
            error = RendezvousProtocolError(f"no handshake within {HANDSHAKE_TIMEOUT_SECONDS:g} s")
            writer.write(encode_frame(refusal(error)))
            return
        except RdtTransportError as error:
            _logger.warning("refused a client of job %s: %s", self._job, error)
            writer.write(encode_frame(refusal(error)))
            return
        client = next(self._numbers)
        self._writers[client] = writer
        self._state.connected(client, self._now())
        self._arm()
        reason = "its connection closed"
        try:
            while True:
                frame = await read_frame(reader, heard=lambda: self._heard(client))
                self._receive(client, frame)
        except RendezvousProtocolError as error:
            reason = f"it broke the protocol: {error}"
            self._send(client, refusal(error))
        except RendezvousLostError:
            pass
        finally:
            self._writers.pop(client, None)
            self._perform(self._state.lost(client, reason, self._now()))

    def _receive(self, client: int, frame: Frame) -> None:
        match frame:
            case {"kind": "heartbeat"}:
                self._send(client, {"kind": "heartbeat"})
            case {"kind": "call", "call": int(call), "timeout_seconds": timeout, "request": body}:
                if not isinstance(timeout, int | float) or not 0 <= timeout <= MAX_TIMEOUT_SECONDS:
                    raise RendezvousProtocolError(f"a timeout of {timeout!r} seconds")
                try:
                    request = decode_request(body)
                except RendezvousProtocolError as error:
                    self._send(client, refusal(error, call))
                    return
                self._ask(client, call, request, timeout)
            case _:
                raise RendezvousProtocolError(f"unknown frame {frame['kind']!r:.80}")

    def _ask(self, client: int, call: int, request: Request, timeout_seconds: float) -> None:
        effects = self._state.request(client, call, request, timeout_seconds, self._now())
        self._perform(effects)
        if not effects:  # it waits, perhaps for less than all that is waited for
            self._arm()

    # ---- clients of this process: a `Service` ------------------------------------------------

    def join(self, deliver: Callable[[Effect], None]) -> int:
        if self._closed:
            raise RendezvousLostError("the rendezvous of this process is closed")
        client = next(self._numbers)
        self._parties[client] = deliver
        self._state.connected(client, self._now(), is_leased=False)
        return client

    def ask(self, client: int, call: int, request: Request, timeout_seconds: float) -> None:
        if client in self._parties:
            self._ask(client, call, request, timeout_seconds)

    def part(self, client: int, reason: str) -> None:
        if self._parties.pop(client, None) is not None:
            self._perform(self._state.lost(client, reason, self._now()))

    # ---- what goes out -----------------------------------------------------------------------

    def _send(self, client: int, frame: Frame, text: str | None = None) -> None:
        """``text``: the frame's JSON, if it is there already."""
        try:
            encoded = encode_frame(frame) if text is None else framed(text, frame["kind"])
        except RendezvousProtocolError as error:  # too large; an event's absence ends the client
            encoded = encode_frame(refusal(error, frame.get("call")))
        earlier = self._announced.pop(client, [])
        self._write(client, b"".join([*earlier, encoded]))

    def _write(self, client: int, frames: bytes) -> None:
        writer = self._writers.get(client)
        if writer is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            _logger.warning("job %s: a client does not read what it is sent", self._job)
            writer.transport.abort()
            return
        writer.write(frames)

    def _announce(self, client: int, event: Announced) -> None:
        """Tell of a newcomer soon: the workers of a fleet come in crowds, and go out together."""
        text = f'{{"kind":"event","event":{self._announcement(event)}}}'
        if not self._announced:
            asyncio.get_running_loop().call_later(_CROWD_SECONDS, self._flush)
        self._announced.setdefault(client, []).append(framed(text, "event"))

    def _flush(self) -> None:
        announced, self._announced = self._announced, {}
        for client, frames in announced.items():
            self._write(client, b"".join(frames))

    def _perform(self, effects: list[Effect]) -> None:
        if self._closed:
            return  # that everybody is cut off now is no news of anybody's death
        for effect in effects:
            if (deliver := self._parties.get(effect.client)) is not None:
                deliver(effect)
                continue
            match effect:
                case Answer(client, call, request, value):
                    self._answer(client, call, request, value)
                case Refusal(client, call, error):
                    self._send(client, refusal(error, call))
                case Push(client, Announced() as event):
                    self._announce(client, event)
                case Push(client, event):
                    self._send(client, {"kind": "event", "event": encode_message(event)})
                case Disconnect(client, reason):
                    self._send(client, refusal(RendezvousLostError(reason)))
                    if (writer := self._writers.pop(client, None)) is not None:
                        writer.close()
                        loop = asyncio.get_running_loop()
                        loop.call_later(_FLUSH_SECONDS, writer.transport.abort)

    def _answer(self, client: int, call: int, request: Request, value: Any) -> None:
        """The job, which every worker is told, is encoded once."""
        if not isinstance(value, JobRecord):
            answer = encode_answer(request, value)
            self._send(client, {"kind": "answer", "call": call, "value": answer})
            return
        if self._job_told is None or self._job_told[0] != value:
            self._job_told = value, COMPACT.encode(encode_answer(request, value))
        text = f'{{"kind":"answer","call":{call},"value":{self._job_told[1]}}}'
        self._send(client, {"kind": "answer", "call": call}, text)

    # ---- time --------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _heard(self, client: int) -> None:
        self._state.heard(client, self._now())

    def _arm(self) -> None:
        """Have `_tick` called at the next deadline, or earlier: leases only grow."""
        deadline = self._state.next_deadline()
        if self._closed or deadline == inf:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        assert self._timer is not None
        late_seconds = self._now() - self._timer.when()
        self._timer = None
        if late_seconds > self._settings.lease_seconds / 10:
            self._state.stalled(late_seconds)
        self._perform(self._state.tick(self._now()))
        self._arm()
