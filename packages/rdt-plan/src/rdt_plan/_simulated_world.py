"""What simulated parties share: memory that remembers who wrote it, and a network that delays."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Protocol

from rdt_plan.doorbell import ID_BYTES, Doorbell, Kind
from rdt_plan.identity import ConsumerId

__all__ = ["RENDEZVOUS", "SESSION", "Channel", "Identity", "Live", "Slot", "Step", "World"]

SESSION = bytes(ID_BYTES)
RENDEZVOUS = "rendezvous"

Step = Callable[[], None]

Live = Mapping[ConsumerId, str]
"""The consumers of an epoch, each with the name of its incarnation."""

Slot = tuple[int, int, int]
"""A serve slot: rank, arena, and place in it."""

Identity = tuple[int, str, int, int]
"""What a slot holds: the chunk of an epoch, a ring, an owner and a seq."""

Channel = tuple[str, str]
"""Sender and receiver."""


class _Receiver(Protocol):
    def deliver(self, sender: str, doorbell: Doorbell) -> None: ...


@dataclass
class World:
    """What one simulation's parties have in common; they are called by name.

    Attributes:
        rng: decides everything that is left open.
        duplicate_rate: how likely a doorbell arrives again, after those behind it.
        serve: what each serve slot holds; None while it is written.
        sources: by rank and group, the epoch whose tensors lie in the rank's own memory, readable;
            None while they are written, and once they may change.
        channels: what is under way, in order.
        receivers: who takes doorbells.
        fenced: names of consumers that were dropped, whether they have heard of it or not.
        num_doorbells: to and from each consumer, when they are sent; repeats do not count.
        violations: what went wrong.
    """

    rng: Random
    duplicate_rate: float
    serve: dict[Slot, Identity | None] = field(default_factory=dict)
    sources: dict[tuple[int, int], int | None] = field(default_factory=dict)
    channels: dict[Channel, deque[Step | bytes]] = field(default_factory=dict)
    receivers: dict[str, _Receiver] = field(default_factory=dict)
    fenced: set[str] = field(default_factory=set)
    num_doorbells: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @staticmethod
    def address(name: str) -> bytes:
        """The incarnation id in doorbells."""
        return sha256(name.encode()).digest()[:ID_BYTES]

    def ring(self, epoch: int, sender: str, receiver: str, kind: Kind, seq: int) -> None:
        """Send a doorbell; those of one pair keep their order, but for repeats."""
        self.num_doorbells[receiver if kind is Kind.READY else sender] += 1
        ids = self.address(sender), self.address(receiver)
        message = Doorbell(SESSION, epoch, *ids, kind, seq).encode()
        self.channels.setdefault((sender, receiver), deque()).append(message)

    def tell(self, sender: str, receiver: str, what: Step) -> None:
        """Send something over a connection of the rendezvous, which loses and repeats nothing."""
        self.channels.setdefault((sender, receiver), deque()).append(what)

    def pass_on(self, channel: Channel) -> None:
        """Let the next message of a channel arrive."""
        messages = self.channels[channel]
        message = messages.popleft()
        if not isinstance(message, bytes):
            message()
            return
        if self.rng.random() < self.duplicate_rate:
            messages.append(message)
        sender, receiver = channel
        self.receivers[receiver].deliver(sender, Doorbell.decode(message))
