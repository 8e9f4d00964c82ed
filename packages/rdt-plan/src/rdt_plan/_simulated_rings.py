"""A simulated producer's serve rings: who reads which arena of its memory."""

from dataclasses import dataclass, field

from rdt_plan.identity import ConsumerId
from rdt_plan.sharing import check_sharing
from rdt_plan.table import ChunkTable

__all__ = ["Ring", "SimulatedRings"]


@dataclass
class Ring:
    """The ring of every consumer with one plan; ``arena`` numbers its memory."""

    table: ChunkTable
    arena: int
    readers: set[str] = field(default_factory=set)


class SimulatedRings:
    """Rings by plan digest and readers by incarnation, changed between epochs only.

    An arena whose last reader left goes to the next ring.
    """

    def __init__(self) -> None:
        self.rings: dict[str, Ring] = {}
        self._served: dict[str, tuple[ConsumerId, str]] = {}
        self._idle: list[int] = []
        self._num_arenas = 0

    def admit(self, who: ConsumerId, incarnation: str, table: ChunkTable) -> Ring:
        """The ring that this consumer reads from now on."""
        ring = self.rings.get(table.plan_digest)
        if ring is None:
            if not self._idle:
                self._idle.append(self._num_arenas)
                self._num_arenas += 1
            ring = self.rings[table.plan_digest] = Ring(table, self._idle.pop())
        check_sharing(table, ring.table)
        ring.readers.add(incarnation)
        self._served[incarnation] = (who, table.plan_digest)
        return ring

    def dismiss(self, incarnation: str) -> None:
        """Forget one that was dropped, if it was ever admitted."""
        _, digest = self._served.pop(incarnation, (None, ""))
        if (ring := self.rings.get(digest)) is not None:
            ring.readers.discard(incarnation)
            if not ring.readers:
                self._idle.append(self.rings.pop(digest).arena)

    def serves(self, incarnation: str) -> bool:
        return incarnation in self._served

    def table(self, incarnation: str) -> ChunkTable:
        """The table of the ring that an admitted consumer reads."""
        _, digest = self._served[incarnation]
        return self.rings[digest].table
