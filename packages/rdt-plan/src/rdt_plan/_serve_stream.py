"""One serve ring during one epoch: its chunks, and who has yet to read them."""

from collections.abc import Mapping

from rdt_plan.errors import PlanError
from rdt_plan.identity import ConsumerId
from rdt_plan.sharing import check_sharing
from rdt_plan.table import ChunkTable
from rdt_plan.transitions import ServeState

__all__ = ["ServeStream"]


class ServeStream:
    """The states of a ring's chunks, by seq, the next to start, and the ring's live readers.

    Args:
        tables: of every reader; equal but for their consumer.

    Raises `PlanError` when the tables differ, or the chunks are not numbered by seq.
    """

    def __init__(self, tables: Mapping[ConsumerId, ChunkTable]) -> None:
        self.readers = sorted(tables)  # those that are live
        first = tables[self.readers[0]]
        for reader in self.readers[1:]:
            check_sharing(tables[reader], first)
        self.name = ", ".join(f"consumer {reader}" for reader in self.readers)
        self.chunks = first.chunks
        self.states = [ServeState.QUEUED] * len(self.chunks)
        self.slotted = tuple(chunk.seq for chunk in self.chunks if not chunk.is_direct)
        self.num_started = 0  # of the slotted chunks, in their order
        self.direct: dict[int, list[int]] = {}  # the direct chunks of each group
        self._unread = [set(self.readers) for _ in self.chunks]
        self._used_before: list[int | None] = []  # the chunk that had the same serve slot before
        last_in_slot: dict[int, int] = {}
        for seq, chunk in enumerate(self.chunks):
            if chunk.seq != seq:
                raise PlanError(f"{self.name}: expected seq {seq}, found {chunk.seq}")
            if chunk.serve_slot is None:
                self._used_before.append(None)
                self.direct.setdefault(chunk.group, []).append(seq)
                continue
            self._used_before.append(last_in_slot.get(chunk.serve_slot))
            last_in_slot[chunk.serve_slot] = seq

    def check_schedule(self, positions: Mapping[int, int]) -> None:
        """Raises `PlanError` unless the chunks follow the producer's groups, by ``positions``."""
        last = 0
        for chunk in self.chunks:
            position = positions.get(chunk.group)
            if position is None or position < last:
                raise PlanError(
                    f"{self.name}: seq {chunk.seq} of group {chunk.group} is out of the group "
                    f"schedule of its producer: {tuple(positions)}"
                )
            last = position

    def has_free_slot(self, seq: int) -> bool:
        """Whether the chunk that had the serve slot of ``seq`` before has been read by all."""
        before = self._used_before[seq]
        return before is None or self.states[before] is ServeState.READ

    def owes(self, reader: ConsumerId, seq: int) -> bool:
        """Whether ``reader`` is live and its DONE of ``seq`` has not come."""
        return reader in self._unread[seq]

    def waits_for(self, seq: int) -> list[ConsumerId]:
        """The live readers whose DONE of ``seq`` has not come."""
        return sorted(self._unread[seq])

    def read(self, reader: ConsumerId, seq: int) -> bool:
        """Count the DONE of ``reader``; True when it was the last one."""
        self._unread[seq].discard(reader)
        return not self._unread[seq]

    def leave(self, reader: ConsumerId) -> list[int]:
        """Count ``reader`` no more; returns the announced chunks that only it had yet to read."""
        self.readers.remove(reader)
        read = []
        for seq, unread in enumerate(self._unread):
            if reader in unread:
                unread.remove(reader)
                if not unread and self.states[seq] is ServeState.ANNOUNCED:
                    read.append(seq)
        return read
