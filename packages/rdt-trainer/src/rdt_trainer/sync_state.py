"""What a trainer rank does when something fails a sync for everybody: pure decisions.

The first failure decides the outcome. What follows from it depends only on what failed and on how
far the sync had come, and is one row of a table here; `rdt_trainer.sync` carries it out. What
fails one replica alone is `rdt_trainer.replicas`'.
"""

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Cause", "Consequence", "Failure", "Stage", "SyncState"]


class Stage(Enum):
    """How far a sync has come on this rank, in this order."""

    BEGIN = auto()
    """The epoch is not known to be open."""
    GATHER = auto()
    """The source is being iterated and groups are published."""
    WAIT = auto()
    """Everything is published; consumers still read."""
    FINISH = auto()
    """Nobody reads; workers still install and commit."""
    DONE = auto()
    """All ranks know which replicas have committed."""


class Cause(Enum):
    """What may fail."""

    BEGIN = auto()
    """The rendezvous did not open the epoch for this rank."""
    SOURCE_MISMATCH = auto()
    """The source yielded other than it declared."""
    SOURCE_RAISED = auto()
    """The source's iterator raised: its pass is over."""
    PRODUCER = auto()
    """This rank's producer, or one of its deadlines."""
    PEER = auto()
    """The rendezvous told us that the epoch failed: by another rank, or with the last replica."""
    CONNECTION = auto()
    """The rendezvous itself is gone."""
    INTERRUPT = auto()
    """The caller's thread was interrupted (Ctrl-C)."""


@dataclass(frozen=True, slots=True)
class Consequence:
    """What to do about a failure.

    Attributes:
        tell: fail the epoch at the rendezvous, so that every rank and worker gives it up.
        stop: abort this rank's producer, so that nothing reads the source's tensors.
        discard: iterate the rest of the source without publishing, so that collectives match.
    """

    tell: bool
    stop: bool
    discard: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a sync."""

    cause: Cause
    stage: Stage
    error: BaseException


KNOWN_TO_RENDEZVOUS = frozenset((Cause.PEER, Cause.CONNECTION))
ENDS_THE_PASS = frozenset((Cause.SOURCE_RAISED, Cause.INTERRUPT))


class SyncState:
    """One epoch on one rank. Not thread-safe: the driver locks."""

    def __init__(self) -> None:
        self.stage = Stage.BEGIN
        self.failure: Failure | None = None

    def advance(self, stage: Stage) -> None:
        """Enter the next stage. After a failure the stage stays where it was."""
        if self.failure is None:
            self.stage = stage

    def fail(self, cause: Cause, error: BaseException) -> Consequence | None:
        """Note a failure; None when the outcome is decided already.

        >>> state = SyncState()
        >>> state.advance(Stage.GATHER)
        >>> state.fail(Cause.PRODUCER, RuntimeError("a peer hangs"))
        Consequence(tell=True, stop=True, discard=True)
        >>> state.fail(Cause.PEER, RuntimeError("epoch 1 failed: a peer hangs")) is None
        True
        """
        if self.failure is not None or self.stage is Stage.DONE:
            return None
        self.failure = Failure(cause, self.stage, error)
        return Consequence(
            tell=cause not in KNOWN_TO_RENDEZVOUS,
            stop=self.stage is not Stage.BEGIN,
            discard=self.stage in (Stage.BEGIN, Stage.GATHER) and cause not in ENDS_THE_PASS,
        )
