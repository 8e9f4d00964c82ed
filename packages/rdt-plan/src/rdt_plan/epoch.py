"""What the two roles of an epoch share: its states and the actions that end it."""

from dataclasses import dataclass
from enum import Enum

__all__ = ["EpochState", "Finished", "Quiesced"]


class EpochState(Enum):
    """Where one participant is in its epoch. FINISHED and QUIESCED are terminal."""

    NEW = "new"  #: a consumer that has not begun.
    RUNNING = "running"
    FINISHED = "finished"  #: everything was transferred.
    ABORTING = "aborting"  #: nothing new starts; what is in flight drains.
    QUIESCED = "quiesced"  #: aborted, and nothing is in flight.


@dataclass(frozen=True, slots=True)
class Finished:
    """The epoch is complete for this participant; emitted once."""


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The epoch was aborted and nothing of it is in flight any more; emitted once.

    Attributes:
        reason: why it was aborted; the first reason when there were several.
    """

    reason: str
