"""One consumer incarnation, as the rendezvous knows it. Pure: part of `JobState`."""

from dataclasses import dataclass, field

from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription

__all__ = ["Member"]


@dataclass(slots=True)
class Member:
    """A consumer incarnation that is subscribed; ``owed`` are owners that have not offered yet."""

    subscription: SealedSubscription
    client: int
    ready: bool = False
    offers: dict[int, SealedOffer] = field(default_factory=dict)
    owed: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.owed = {table.owner for table in self.subscription.tables}

    @property
    def incarnation(self) -> str:
        return self.subscription.head.incarnation

    @property
    def num_workers(self) -> int:
        return self.subscription.head.num_workers
