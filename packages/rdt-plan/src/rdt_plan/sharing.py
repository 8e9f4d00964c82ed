"""Which consumers may read one serve ring: those whose chunk tables are the same.

Consumers whose whole plans have one digest read the same chunks in the same order, from every
producer, so each chunk is packed once for all of them. But a digest is only a claim: the tables
themselves are compared.
"""

from collections.abc import Iterator
from itertools import chain

from rdt_plan.errors import PlanError
from rdt_plan.table import ChunkTable

__all__ = ["check_sharing"]


def check_sharing(table: ChunkTable, other: ChunkTable) -> None:
    """Raises `PlanError` with the first difference, if any but of their consumers."""
    pairs = zip(_head(other), _head(table), strict=True)
    if table.chunks is not other.chunks:  # equal tables are often opened once, for both
        pairs = chain(pairs, zip(_rows(other), _rows(table), strict=False))
    for (what, expected), (_, found) in pairs:
        if expected != found:
            raise PlanError(
                f"consumer {table.consumer} claims plan {table.plan_digest}, as consumer "
                f"{other.consumer} does, but its chunk table differs in {what}: expected "
                f"{expected}, found {found}; install one release of rdt-plan on both"
            )


def _head(table: ChunkTable) -> Iterator[tuple[str, object]]:
    yield "plan_digest", table.plan_digest
    yield "owner", table.owner
    yield "num_slots", table.num_slots
    yield "slot_bytes", table.slot_bytes


def _rows(table: ChunkTable) -> Iterator[tuple[str, object]]:
    """All that a table says of its chunks; counts come before what they count."""
    yield "its number of chunks", len(table.chunks)
    for index, chunk in enumerate(table.chunks):
        here = f"chunk {index}"
        yield f"{here}: seq", chunk.seq
        yield f"{here}: group", chunk.group
        yield f"{here}: serve_slot", chunk.serve_slot
        yield f"{here}: num_bytes", chunk.num_bytes
        for what, parts in (("slice", chunk.slices), ("offset", chunk.offsets)):
            yield f"{here}: its number of {what}s", len(parts)
            yield from ((f"{here}: {what} {n}", part) for n, part in enumerate(parts))
