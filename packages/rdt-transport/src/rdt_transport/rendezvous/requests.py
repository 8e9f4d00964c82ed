"""What a client may ask of the rendezvous, and the type of each answer."""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from rdt_plan import ConsumerId
from rdt_plan.records import EpochRecord, JobRecord, ProducerRecord
from rdt_transport.rendezvous.outcome import EpochOutcome
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription

__all__ = [
    "AwaitClose",
    "Begin",
    "Commit",
    "Drop",
    "Fail",
    "GetEpoch",
    "GetJob",
    "GetOffers",
    "GetSubscription",
    "Leave",
    "ListSubscriptions",
    "MakeOffers",
    "Missing",
    "Publish",
    "Ready",
    "Request",
    "SetReplicas",
    "Subscribe",
    "Wait",
]


@dataclass(frozen=True, slots=True)
class Missing:
    """The request cannot be answered yet; ``what()`` says why, as a sentence. Never sent."""

    what: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Publish:
    """A producer's record, and the encoded manifest, packed; empty: as others have published it.

    The answer is whether it is wanted: then nothing is published yet.
    """

    answer: ClassVar[Any] = bool
    record: ProducerRecord
    manifest: bytes


@dataclass(frozen=True, slots=True)
class GetJob:
    """The job, once all producers have published; None if its session is the ``known`` one."""

    answer: ClassVar[Any] = JobRecord | None
    known: str | None = None

    def __str__(self) -> str:
        return "the question for the job"


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A consumer's plan. ``session`` is the one its plan was built for, None if it never asked."""

    answer: ClassVar[Any] = NoneType
    subscription: SealedSubscription
    session: str | None

    def __str__(self) -> str:
        return f"the subscription of consumer {self.subscription.head.consumer}"


@dataclass(frozen=True, slots=True)
class ListSubscriptions:
    """The consumers subscribed now."""

    answer: ClassVar[Any] = tuple[ConsumerId, ...]


@dataclass(frozen=True, slots=True)
class GetSubscription:
    """One of them; None when it is gone."""

    answer: ClassVar[Any] = SealedSubscription | None
    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class MakeOffers:
    """A producer's serve rings for consumers; those that are gone meanwhile are passed over."""

    answer: ClassVar[Any] = NoneType
    offers: tuple[SealedOffer, ...]


@dataclass(frozen=True, slots=True)
class GetOffers:
    """The offers of every owner in the tables of that incarnation, by rank, once all are there."""

    answer: ClassVar[Any] = tuple[SealedOffer, ...]
    consumer: ConsumerId
    incarnation: str

    def __str__(self) -> str:
        return f"consumer {self.consumer}"


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """These are the job's replicas from now on; subscribed workers of others are fenced."""

    answer: ClassVar[Any] = NoneType
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The consumer is attached: it takes part from the next begin."""

    answer: ClassVar[Any] = NoneType
    consumer: ConsumerId
    incarnation: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Open the epoch, or learn the frozen record of the one that is open."""

    answer: ClassVar[Any] = EpochRecord
    rank: int
    epoch: int

    def __str__(self) -> str:
        return f"the begin of epoch {self.epoch} by producer {self.rank}"


@dataclass(frozen=True, slots=True)
class GetEpoch:
    """The open epoch, or that very epoch when a number is given."""

    answer: ClassVar[Any] = EpochRecord
    epoch: int | None

    def __str__(self) -> str:
        return "the question for " + (f"epoch {self.epoch}" if self.epoch else "an open epoch")


@dataclass(frozen=True, slots=True)
class AwaitClose:
    """Answered to all ranks at once: everybody live has committed, and every rank has asked."""

    answer: ClassVar[Any] = EpochOutcome
    rank: int
    epoch: int

    def __str__(self) -> str:
        return f"the wait for the end of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Commit:
    """Granted to all workers of a replica at once."""

    answer: ClassVar[Any] = NoneType
    consumer: ConsumerId
    incarnation: str
    epoch: int

    def __str__(self) -> str:
        return f"the commit of epoch {self.epoch} by consumer {self.consumer}"


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the epoch up."""

    answer: ClassVar[Any] = NoneType
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Fence the consumer's whole replica; with ``epoch``, not if that one has failed anyway."""

    answer: ClassVar[Any] = NoneType
    consumer: ConsumerId
    incarnation: str
    reason: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Everything this connection published or subscribed goes away, in good order."""

    answer: ClassVar[Any] = NoneType


Request = (
    AwaitClose
    | Publish
    | SetReplicas
    | GetJob
    | Subscribe
    | ListSubscriptions
    | GetSubscription
    | MakeOffers
    | GetOffers
    | Ready
    | Begin
    | GetEpoch
    | Commit
    | Fail
    | Drop
    | Leave
)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """A request that is not answered yet: whose, under which number, and until when. Never sent."""

    client: int
    call: int
    request: Request
    timeout_seconds: float
    deadline: float
