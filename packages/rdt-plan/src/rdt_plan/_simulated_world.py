"""What simulated parties share: memory that remembers who wrote it, and a network that delays."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from rdt_plan.doorbell import ID_BYTES, Doorbell, Kind
from rdt_plan.identity import ConsumerId

__all__ = ["SESSION", "Identity", "Step", "World", "address_of"]

SESSION = bytes(ID_BYTES)

Identity = tuple[ConsumerId, int, int]
"""What a slot holds: the chunk of a consumer, an owner and a seq."""

Step = Callable[[], None]


def address_of(party: str) -> bytes:
    """The incarnation id of "consumer r0w1" or "producer 2"."""
    return sha256(party.encode()).digest()[:ID_BYTES]


@dataclass
class World:
    """What one simulation's parties have in common.

    Attributes:
        rng: decides everything that is left open.
        duplicate_rate: how likely a message arrives again, after those behind it.
        serve: contents of each serve slot, by (rank, consumer, slot); None while it is written.
        channels: messages under way, by (sender, receiver), in order.
        violations: what went wrong.
    """

    rng: Random
    duplicate_rate: float
    serve: dict[tuple[int, ConsumerId, int], Identity | None] = field(default_factory=dict)
    channels: dict[tuple[bytes, bytes], deque[bytes]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def send(self, sender: bytes, receiver: bytes, kind: Kind, seq: int) -> None:
        message = Doorbell(SESSION, 1, sender, receiver, kind, seq).encode()
        self.channels.setdefault((sender, receiver), deque()).append(message)

    def receive(self, channel: tuple[bytes, bytes]) -> Doorbell:
        """Take the next message of a channel; it may come again."""
        message = self.channels[channel].popleft()
        if self.rng.random() < self.duplicate_rate:
            self.channels[channel].append(message)
        return Doorbell.decode(message)
