"""A wire in a process of its own, driven from here: for what only two processes can show."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rdt_transport.testing.object_process import ObjectProcess
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
        handle = self._wire.call(lambda wire: wire.prepare_read(peer_name, [(local, remote)]))
        self._wire.call(lambda wire: wire.post(handle, notification))
        (end,) = self._wire.take(1)
        self._wire.call(lambda wire: wire.release(handle))
        return end.reason if isinstance(end, ReadFailed) else None

    def take(self, count: int) -> list[Notification]:
        return [event for event in self._wire.take(count) if isinstance(event, Notification)]


@contextmanager
def _peer(
    make_wire: Callable[[str], Wire], role: str, num_bytes: int, seed: int, poll_seconds: float
) -> Generator[_Peer]:
    with PumpedWire(lambda: make_wire(role), poll_seconds) as wire:
        yield _Peer(wire, num_bytes, seed)


class PeerProcess(ObjectProcess):
    """A spawned process with one wire and one registered buffer; ended at the end of ``with``.

    It can be asked: address, region, contents, fill, connect, notify, read, take.

    Args:
        make_wire: importable; called with ``role`` in the process.
        num_bytes: of its buffer, filled with ``random_bytes(num_bytes, seed)``.
        poll_seconds: how long it sleeps between polls of its wire.
    """

    def __init__(
        self,
        make_wire: Callable[[str], Wire],
        role: str = "peer",
        *,
        num_bytes: int,
        seed: int = 0,
        poll_seconds: float = 0.0005,
    ) -> None:
        super().__init__(_peer, make_wire, role, num_bytes, seed, poll_seconds)
