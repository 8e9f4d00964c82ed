"""A wire in a process of its own, driven from here: for what only two processes can show."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from rdt_transport.errors import WireTimeoutError
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.wire_pair import random_bytes, region_of
from rdt_transport.wire.base import Notification, PeerAddress, ReadFailed, Region, Wire

__all__ = ["PeerProcess"]

_CONNECT_SECONDS = 20.0


class _Peer:
    """What a `PeerProcess` can be asked, run in its process."""

    def __init__(self, wire: PumpedWire, num_bytes: int, seed: int) -> None:
        self._wire = wire
        self._buffer = random_bytes(num_bytes, seed)
        wire.call(lambda wire: wire.register([self._buffer]))

    def address(self) -> PeerAddress:
        return self._wire.call(lambda wire: wire.address())

    def region(self) -> Region:
        return region_of(self._buffer)

    def contents(self) -> bytes:
        return self._buffer.numpy().tobytes()

    def fill(self, seed: int) -> None:
        self._buffer.copy_(random_bytes(self._buffer.numel(), seed))

    def connect(self, peer: PeerAddress) -> None:
        self._wire.call(lambda wire: wire.connect(peer, _CONNECT_SECONDS))

    def notify(self, peer_name: str, message: bytes) -> None:
        self._wire.call(lambda wire: wire.notify(peer_name, message))

    def read(self, peer_name: str, remote: Region, notification: bytes) -> str | None:
        """Read into the own buffer; None when it is done, else why it failed."""
        local = region_of(self._buffer, 0, remote.num_bytes)
        handle = self._wire.call(lambda wire: wire.prepare_read(peer_name, local, remote))
        self._wire.call(lambda wire: wire.post(handle, notification))
        (end,) = self._wire.take(1)
        self._wire.call(lambda wire: wire.release(handle))
        return end.reason if isinstance(end, ReadFailed) else None

    def take(self, count: int) -> list[Notification]:
        return [event for event in self._wire.take(count) if isinstance(event, Notification)]


def _serve(
    connection: Connection,
    make_wire: Callable[[str], Wire],
    role: str,
    num_bytes: int,
    seed: int,
    poll_seconds: float,
) -> None:
    with PumpedWire(lambda: make_wire(role), poll_seconds) as wire:
        peer = _Peer(wire, num_bytes, seed)
        while (request := connection.recv()) is not None:
            method, arguments = request
            try:
                connection.send((True, getattr(peer, method)(*arguments)))
            except Exception as error:
                connection.send((False, error))


class PeerProcess:
    """A spawned process with one wire and one registered buffer; ended at the end of ``with``.

    Args:
        make_wire: importable; called with ``role`` in the process.
        num_bytes: of its buffer, filled with ``random_bytes(num_bytes, seed)``.
        poll_seconds: how long it sleeps between polls of its wire.
    """

    TIMEOUT_SECONDS = 120.0

    def __init__(
        self,
        make_wire: Callable[[str], Wire],
        role: str = "peer",
        *,
        num_bytes: int,
        seed: int = 0,
        poll_seconds: float = 0.0005,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, make_wire, role, num_bytes, seed, poll_seconds)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def ask(self, method: str, *arguments: object) -> Any:
        """What the process's peer answers: address, region, contents, fill, connect, notify, read,
        take. Its exceptions are raised here; `WireTimeoutError` when no answer comes."""
        self._connection.send((method, arguments))
        if not self._connection.poll(self.TIMEOUT_SECONDS):
            raise WireTimeoutError(f"no answer to {method} within {self.TIMEOUT_SECONDS} s")
        done, answer = self._connection.recv()
        if not done:
            raise answer
        return answer

    def stop(self) -> int | None:
        """Close its wire and wait for its exit; the exit code."""
        self._connection.send(None)
        self._process.join(self.TIMEOUT_SECONDS)
        return self._process.exitcode

    def freeze(self) -> None:
        """Stop it from running: from now on it polls nothing, and its connections stay open."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # the signal takes a while

    def kill(self) -> None:
        """End it at once, as a crash does. Idempotent."""
        self._process.kill()
        self._process.join(self.TIMEOUT_SECONDS)
        self._connection.close()
