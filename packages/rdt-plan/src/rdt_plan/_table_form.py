"""The JSON form of a chunk table: columns, since a large plan's tables have 150,000 slices.

A slice is two integers there, mostly those of the slice before: how far its name is after that one
in the manifest, and which of the table's few regions it is. Whoever does not know the manifest
spells names out. Where slices start in a chunk is not said: it follows from their sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from operator import sub
from typing import Any

from rdt_plan._columns import Numbers, integer_column, transposed
from rdt_plan._fields import array, digest, fields, integer, positive, rows, string
from rdt_plan._slice_form import slice_of
from rdt_plan.chunks import ServeChunk
from rdt_plan.errors import WireFormatError
from rdt_plan.identity import ConsumerId
from rdt_plan.layout import pack_layouts
from rdt_plan.slices import Slice, new_slice
from rdt_plan.table import ChunkTable

__all__ = ["table_form", "table_of"]

_TABLE = frozenset(
    {"owner", "plan_digest", "num_slots", "slot_bytes", "names", "regions", "slices", "chunks"}
)


def table_form(table: ChunkTable, numbers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Everything but the consumer: equal workers of two replicas send equal tables.

    ``numbers``: of the manifest's names, in order; None spells all names out.
    """
    slices = chain.from_iterable(chunk.slices for chunk in table.chunks)
    names, *region = transposed(list(slices), 5)
    regions = Numbers()
    return {
        "owner": table.owner,
        "plan_digest": table.plan_digest,
        "num_slots": table.num_slots,
        "slot_bytes": table.slot_bytes,
        "names": names if numbers is None else _steps(names, numbers),
        "slices": regions.column(zip(*region, strict=True)),
        "regions": list(regions),
        "chunks": [
            (chunk.seq, chunk.group, chunk.serve_slot, chunk.num_bytes, len(chunk.slices))
            for chunk in table.chunks
        ],
    }


def _steps(names: Sequence[str], numbers: Mapping[str, int]) -> list[int]:
    """From each name's number to the next one's, around the end; the first counts from 0."""
    total = len(numbers)
    at = list(map(numbers.__getitem__, names))
    return [step % total for step in map(sub, at, (0, *at))]


def table_of(form: Any, consumer: ConsumerId, names: Sequence[str] = ()) -> ChunkTable:
    """``names``: the manifest's, for tables that number them."""
    form = fields(form, "chunk_table", _TABLE)
    regions = rows(form["regions"], "regions", _region_of)
    of = integer_column(form["slices"], "slices", below=len(regions))
    called = _names_of(form["names"], names)
    if len(called) != len(of):
        raise WireFormatError(f"names: expected one a slice ({len(of)}), found {len(called)}")
    if len(set(of)) != len(regions) or len(set(regions)) != len(regions):
        raise WireFormatError("regions: expected each once, and none that no slice is")
    slices = [new_slice((name, *regions[at])) for name, at in zip(called, of, strict=True)]
    sizes = [Slice("", *region).num_bytes for region in regions]
    left = zip(slices, [sizes[at] for at in of], strict=True)
    chunks = rows(form["chunks"], "chunks", lambda row: _chunk_of(row, left))
    if next(left, None) is not None:
        raise WireFormatError(f"slices: expected those of the chunks, found more: {len(of)}")
    return ChunkTable(
        consumer=consumer,
        owner=integer(form["owner"], "owner"),
        plan_digest=digest(form["plan_digest"], "plan_digest"),
        num_slots=positive(form["num_slots"], "num_slots"),
        slot_bytes=integer(form["slot_bytes"], "slot_bytes"),
        chunks=chunks,
    )


def _names_of(value: Any, names: Sequence[str]) -> Sequence[str]:
    """Spelled out, or as steps through the manifest's."""
    column = array(value, "names")
    if not column or type(column[0]) is str:
        return [string(name, "names") for name in column]
    if not names:
        raise WireFormatError("names: expected strings: the manifest that numbers them is unknown")
    steps = integer_column(column, "names", below=len(names))
    return [names[number % len(names)] for number in accumulate(steps)]


def _region_of(row: Any) -> tuple[Any, ...]:
    return slice_of(["", *array(row, "region", 4)])[1:]


def _chunk_of(row: Any, left: Iterator[tuple[Slice, int]]) -> ServeChunk:
    """The row's chunk, which takes its slices, and their bytes, from ``left``."""
    seq, group, serve_slot, num_bytes, num_slices = array(row, "chunk", 5)
    taken = list(islice(left, integer(num_slices, "num_slices")))
    if len(taken) != num_slices:
        raise WireFormatError(f"num_slices: expected at most {len(taken)}, found {num_slices}")
    direct = serve_slot is None
    return ServeChunk(
        seq=integer(seq, "seq"),
        group=integer(group, "group"),
        serve_slot=None if direct else integer(serve_slot, "serve_slot"),
        num_bytes=integer(num_bytes, "num_bytes"),
        slices=tuple([slice_ for slice_, _ in taken]),
        offsets=() if direct else pack_layouts([size for _, size in taken])[0].offsets,
    )
