"""Chunk tables and chunks by hand: for tests of whatever serves, or reads, them."""

from collections.abc import Sequence

from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.identity import ConsumerId
from rdt_plan.slices import Slice
from rdt_plan.table import ChunkTable

__all__ = ["read_chunks", "serve_table"]


def serve_table(
    consumer: ConsumerId, groups: Sequence[int], num_slots: int = 2, plan_digest: str = ""
) -> ChunkTable:
    """One chunk of 4 bytes for each of ``groups``, in this order, of owner 1.

    Without ``plan_digest`` it is the consumer's name, so that it shares its ring with nobody.
    """
    rows = []
    for seq, group in enumerate(groups):
        slices = (Slice(f"l.{group}.w", "int8", 0, (4,), (1,)),)
        rows.append(ServeChunk(seq, group, seq % num_slots, 4, slices, (0,)))
    return ChunkTable(consumer, 1, plan_digest or str(consumer), num_slots, 16, tuple(rows))


def read_chunks(owners: Sequence[int], num_slots: int) -> list[Chunk]:
    """One chunk of three slices, the last two of one tensor, for each of ``owners``, in order."""
    found: list[Chunk] = []
    for index, owner in enumerate(owners):
        seq = list(owners[:index]).count(owner)
        slices = tuple(Slice(f"l.{index}.{name}", "int8", 0, (4,), (1,)) for name in "abb")
        serve = ServeChunk(seq, 0, seq % num_slots, 48, slices, (0, 16, 32))
        found.append(Chunk(index, owner, serve, index % num_slots, (), (), ()))
    return found
