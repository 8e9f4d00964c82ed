"""Chunk tables and chunks by hand: for tests of whatever serves, or reads, them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.identity import ConsumerId
from rdt_plan.lanes import slots_of
from rdt_plan.slices import Slice
from rdt_plan.table import ChunkTable, slot_bytes

__all__ = ["read_chunks", "serve_table"]


def serve_table(
    consumer: ConsumerId,
    groups: Sequence[int],
    num_slots: int = 2,
    plan_digest: str = "",
    direct: Collection[int] = (),
) -> ChunkTable:
    """One chunk of 4 bytes for each of ``groups``, in this order, of owner 1.

    Those whose seq is in ``direct`` are direct. Without ``plan_digest`` it is the consumer's name,
    so that it shares its ring with nobody.
    """
    rows: list[ServeChunk] = []
    for seq, group in enumerate(groups):
        slices = (Slice(f"l.{group}.w", "int8", 0, (4,), (1,)),)
        if seq in direct:
            rows.append(ServeChunk(seq, group, None, 4, slices, ()))
            continue
        slot = sum(not row.is_direct for row in rows) % num_slots
        rows.append(ServeChunk(seq, group, slot, 4, slices, (0,)))
    return ChunkTable(
        consumer, 1, plan_digest or str(consumer), num_slots, slot_bytes(rows), tuple(rows)
    )


def read_chunks(
    owners: Sequence[int],
    num_slots: int,
    direct: Collection[int] = (),
    lanes: Mapping[int, int] | None = None,
) -> list[Chunk]:
    """One chunk of three slices, the last two of one tensor, for each of ``owners``, in order.

    Those whose index is in ``direct`` are direct. ``lanes`` are by owner; None: all are of one.
    """
    found: list[Chunk] = []
    received: Counter[int] = Counter()
    num_lanes = max(lanes.values(), default=0) + 1 if lanes else 1
    for index, owner in enumerate(owners):
        seq = list(owners[:index]).count(owner)
        slices = tuple(Slice(f"l.{index}.{name}", "int8", 0, (4,), (1,)) for name in "abb")
        if index in direct:
            serve = ServeChunk(seq, 0, None, 12, slices, ())
            found.append(Chunk(index, owner, serve, None, (), (), ()))
            continue
        slotted = [chunk.owner for chunk in found if not chunk.is_direct]
        serve_slot = slotted.count(owner) % num_slots
        serve = ServeChunk(seq, 0, serve_slot, 48, slices, (0, 16, 32))
        lane = lanes[owner] if lanes else 0
        slots = slots_of(lane, num_lanes, num_slots)
        found.append(Chunk(index, owner, serve, slots[received[lane] % len(slots)], (), (), ()))
        received[lane] += 1
    return found
