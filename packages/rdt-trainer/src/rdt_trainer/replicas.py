"""What becomes of each replica in one sync, as the rank that drives their servers sees it.

Pure decisions: every fate is one row of a table. Whether a replica has the weights in the end is
the rendezvous' to say, to all ranks alike (`rdt_transport.rendezvous.EpochOutcome`).
"""

from collections.abc import Iterable
from enum import Enum, auto

__all__ = ["Fate", "ReplicaEvent", "Replicas"]


class Fate(Enum):
    """Where a replica stands."""

    DRIVEN = auto()
    """Its server is in the calls of this sync."""
    DONE = auto()
    """Its server's calls ended well."""
    FALLEN = auto()
    """It was dropped: the others go on without it."""


class ReplicaEvent(Enum):
    """What may be heard of a replica."""

    ENDED = auto()
    """Its server's last call ended well."""
    FAILED = auto()
    """A call of its server failed, or took too long."""
    DROPPED = auto()
    """The rendezvous dropped it."""


# The next fate, and whether the rendezvous is to be told that the replica is dropped.
TRANSITIONS: dict[tuple[Fate, ReplicaEvent], tuple[Fate, bool]] = {
    (Fate.DRIVEN, ReplicaEvent.ENDED): (Fate.DONE, False),
    (Fate.DRIVEN, ReplicaEvent.FAILED): (Fate.FALLEN, True),
    (Fate.DRIVEN, ReplicaEvent.DROPPED): (Fate.FALLEN, False),
    (Fate.DONE, ReplicaEvent.DROPPED): (Fate.FALLEN, False),
}


class Replicas:
    """The replicas that take part in one sync. Not thread-safe: the driver locks.

    >>> replicas = Replicas([0, 2])
    >>> replicas.note(2, ReplicaEvent.FAILED), replicas.note(2, ReplicaEvent.DROPPED)
    (True, False)
    >>> replicas.note(0, ReplicaEvent.ENDED), replicas.driven, replicas.all_fell
    (False, [], False)
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        self._fates = dict.fromkeys(replicas, Fate.DRIVEN)

    def note(self, replica: int, event: ReplicaEvent) -> bool:
        """Whether the rendezvous must be told to drop it. What changes no fate is ignored."""
        fate = self._fates.get(replica)
        if fate is None or (fate, event) not in TRANSITIONS:
            return False
        self._fates[replica], tell = TRANSITIONS[fate, event]
        return tell

    @property
    def driven(self) -> list[int]:
        """Whose fate is open; while there are any, the sync has not ended."""
        return [replica for replica, fate in self._fates.items() if fate is Fate.DRIVEN]

    @property
    def all_fell(self) -> bool:
        """Nobody is left to send weights to."""
        return all(fate is Fate.FALLEN for fate in self._fates.values())
