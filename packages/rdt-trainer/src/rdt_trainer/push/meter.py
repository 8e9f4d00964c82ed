"""How much of a push has been read, told by the doorbells that ride on the reads themselves."""

from collections.abc import Iterable

from rdt_plan import Doorbell, Kind, Subscription
from rdt_plan.errors import PeerProtocolError
from rdt_transport.wire.base import Notification, ReadDone, ReadFailed
from rdt_transport.wire.nixl import NixlWire

__all__ = ["Meter", "MeteredWire"]


class Meter:
    """Counts the bytes of every chunk that a worker says it has read; one thread counts.

    Attributes:
        total_bytes: of all chunks of all workers.
        bytes_read: of those read so far.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self.bytes_read = 0
        self._sizes: dict[bytes, dict[int, int]] = {}  # by incarnation and seq

    def expect(self, subscriptions: Iterable[Subscription]) -> None:
        """These workers will read, once, what their tables say."""
        self._sizes = {
            bytes.fromhex(each.incarnation): {
                chunk.seq: chunk.num_bytes for table in each.tables for chunk in table.chunks
            }
            for each in subscriptions
        }
        self.total_bytes = sum(sum(sizes.values()) for sizes in self._sizes.values())
        self.bytes_read = 0

    def note(self, message: bytes) -> None:
        """Count a doorbell; whatever else arrives is the producer's to refuse."""
        try:
            doorbell = Doorbell.decode(message)
        except PeerProtocolError:
            return
        if doorbell.kind is Kind.DONE:
            self.bytes_read += self._sizes.get(doorbell.sender, {}).pop(doorbell.seq, 0)


class MeteredWire(NixlWire):
    """A NIXL wire whose doorbells are counted.

    Args:
        role: as of `NixlWire`.
        meter: counts them.
    """

    def __init__(self, role: str, meter: Meter) -> None:
        super().__init__(role)
        self._meter = meter

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        events = super().poll()
        for event in events:
            if isinstance(event, Notification):
                self._meter.note(event.message)
        return events
