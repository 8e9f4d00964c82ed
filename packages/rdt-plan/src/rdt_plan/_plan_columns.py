"""What the digest of a plan is taken over: columns, a few times as fast as a row a slice.

Everything of the plan is there but its consumer: equal workers of two replicas agree.
"""

import hashlib
import sys
from array import array
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

from rdt_plan._columns import Numbers, transposed
from rdt_plan._encoding import plan_head

if TYPE_CHECKING:
    from rdt_plan.chunks import Chunk
    from rdt_plan.plan import SyncPlan

__all__ = ["plan_columns"]


_BLOCK = 32  # chunks at a time: a large plan does not fit a processor's cache
_SLICE = itemgetter(0)  # of a copy


def plan_columns(plan: "SyncPlan") -> dict[str, Any]:
    regions, places, forms = Numbers(), Numbers(), Numbers()
    chunks: list[tuple[Any, ...]] = []
    names: list[str] = []
    slices: list[int] = []
    offsets: list[int] = []
    destinations: list[int] = []
    copies: list[int] = []
    for start in range(0, len(plan.chunks), _BLOCK):
        block = plan.chunks[start : start + _BLOCK]
        chunks += map(_row, block)
        name, *region = transposed([each for chunk in block for each in chunk.serve.slices], 5)
        landed = [copy for chunk in block for copy in chunk.placements]
        _, module, param, offset, *form = transposed(landed, 8)
        names += name
        slices += regions.column(zip(*region, strict=True))
        offsets += offset
        destinations += places.column(zip(module, param, strict=True))
        copies += forms.column(zip(*form, strict=True))
    return {
        **plan_head(plan),
        "chunks": chunks,
        "names": names,
        "slices": _hashed(slices),
        "regions": list(regions),
        "offsets": _hashed(offsets),
        "destinations": _hashed(destinations),
        "places": list(places),
        "copies": _hashed(copies),
        "forms": list(forms),
    }


def _hashed(column: list[int]) -> str:
    """SHA-256 over 8 bytes a number, little-endian: to spell them out takes four times as long."""
    numbers = array("Q", column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.sha256(numbers).hexdigest()


def _row(chunk: "Chunk") -> tuple[Any, ...]:
    serve = chunk.serve
    return (
        chunk.index,
        chunk.owner,
        serve.seq,
        serve.group,
        serve.serve_slot,
        serve.num_bytes,
        len(serve.slices),
        serve.offsets,
        chunk.receive_slot,
        len(chunk.placements),
        _slices_copied(chunk),
        chunk.materialize,
        chunk.complete,
    )


def _slices_copied(chunk: "Chunk") -> list[int] | None:
    """Which slice of the chunk each placement copies; None: each copies the next one."""
    slices = chunk.serve.slices
    copied = list(map(_SLICE, chunk.placements))
    if len(copied) == len(slices) and all(map(is_, copied, slices)):
        return None
    index_of = {slice_: index for index, slice_ in enumerate(slices)}
    numbers = list(map(index_of.__getitem__, copied))
    return None if numbers == list(range(len(slices))) else numbers
