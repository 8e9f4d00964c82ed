"""What the rendezvous tells its clients without being asked."""

from dataclasses import dataclass

from rdt_plan import ConsumerId
from rdt_plan.records import Subscription
from rdt_transport.rendezvous.sealed import SealedSubscription

__all__ = [
    "Announced",
    "ConnectionLost",
    "ConsumerDropped",
    "ConsumerLeft",
    "EpochFailed",
    "ProducerLost",
    "PushedEvent",
    "RendezvousEvent",
    "SessionChanged",
    "Subscribed",
]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A consumer wants weights. Producers get this, each with the tables of its own ranks only."""

    subscription: Subscription


@dataclass(frozen=True, slots=True)
class Announced:
    """What is pushed for `Subscribed`; the client opens it."""

    subscription: SealedSubscription


@dataclass(frozen=True, slots=True)
class ConsumerDropped:
    """That incarnation is fenced: it can never commit again, and takes part in nothing."""

    consumer: ConsumerId
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConsumerLeft:
    """That incarnation said goodbye."""

    consumer: ConsumerId
    incarnation: str


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """The epoch was given up; nobody may commit it."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProducerLost:
    """A producer left or died. No epoch begins until its rank has been published again."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """A producer came back as a new incarnation: subscriptions are void, epochs start again at 1.

    Consumers fetch the job again and subscribe again.
    """

    session: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The client's connection is gone (its own observation, never sent). Always the last event."""

    reason: str


RendezvousEvent = (
    Subscribed
    | ConsumerDropped
    | ConsumerLeft
    | EpochFailed
    | ProducerLost
    | SessionChanged
    | ConnectionLost
)
PushedEvent = (
    Announced | ConsumerDropped | ConsumerLeft | EpochFailed | ProducerLost | SessionChanged
)
