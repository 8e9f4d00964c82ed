"""How an epoch ended: the same for everybody who asks."""

from dataclasses import dataclass

__all__ = ["DroppedReplica", "EpochOutcome"]


@dataclass(frozen=True, slots=True)
class DroppedReplica:
    """A replica without the epoch's weights, and why: it was dropped, or took no part."""

    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class EpochOutcome:
    """An epoch that did not fail.

    Attributes:
        epoch: its number.
        committed: the replicas that have its weights, in order; at least one.
        dropped: all others of the job, in order.
    """

    epoch: int
    committed: tuple[int, ...]
    dropped: tuple[DroppedReplica, ...]
