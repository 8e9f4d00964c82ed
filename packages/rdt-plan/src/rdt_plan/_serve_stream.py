"""One consumer's chunks at one producer during one epoch."""

from collections.abc import Mapping, Sequence

from rdt_plan.chunks import ServeChunk
from rdt_plan.errors import PlanError
from rdt_plan.identity import ConsumerId
from rdt_plan.transitions import ServeState

__all__ = ["ServeStream"]


class ServeStream:
    """The states of a consumer's chunks, by seq, and the next one to pack.

    Raises `PlanError` when the chunks are not numbered by seq.
    """

    def __init__(self, consumer: ConsumerId, chunks: Sequence[ServeChunk]) -> None:
        self.consumer = consumer
        self.chunks = tuple(chunks)
        self.states = [ServeState.QUEUED] * len(self.chunks)
        self.next_seq = 0
        self.live = True
        self._used_before: list[int | None] = []  # the chunk that had the same serve slot before
        last_in_slot: dict[int, int] = {}
        for seq, chunk in enumerate(self.chunks):
            if chunk.seq != seq:
                raise PlanError(f"consumer {consumer}: expected seq {seq}, found {chunk.seq}")
            self._used_before.append(last_in_slot.get(chunk.serve_slot))
            last_in_slot[chunk.serve_slot] = seq

    def check_schedule(self, positions: Mapping[int, int]) -> None:
        """Raises `PlanError` unless the chunks follow the producer's groups, by ``positions``."""
        last = 0
        for chunk in self.chunks:
            position = positions.get(chunk.group)
            if position is None or position < last:
                raise PlanError(
                    f"consumer {self.consumer}: seq {chunk.seq} of group {chunk.group} is out of "
                    f"the group schedule of its producer: {tuple(positions)}"
                )
            last = position

    def has_free_slot(self, seq: int) -> bool:
        """Whether the chunk that had the serve slot of ``seq`` before has been read."""
        before = self._used_before[seq]
        return before is None or self.states[before] is ServeState.READ
