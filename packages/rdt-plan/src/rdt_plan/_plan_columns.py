"""What the digest of a plan is taken over: columns, a few times as fast as a row a slice.

Everything of the plan is there but its consumer: equal workers of two replicas agree.
"""

import hashlib
import sys
from array import array
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

from rdt_plan._columns import Numbers
from rdt_plan._encoding import plan_head

if TYPE_CHECKING:
    from rdt_plan.chunks import Chunk
    from rdt_plan.plan import SyncPlan

__all__ = ["plan_columns"]


_NAME, _REGION = itemgetter(0), itemgetter(slice(1, None))  # of a slice
_PLACE, _OFFSET, _FORM = itemgetter(1, 2), itemgetter(3), itemgetter(slice(4, None))  # of a copy


def plan_columns(plan: "SyncPlan") -> dict[str, Any]:
    slices = list(chain.from_iterable(chunk.serve.slices for chunk in plan.chunks))
    copies = list(chain.from_iterable(chunk.placements for chunk in plan.chunks))
    regions, places, forms = Numbers(), Numbers(), Numbers()
    return {
        **plan_head(plan),
        "chunks": list(map(_row, plan.chunks)),
        "names": list(map(_NAME, slices)),
        "slices": _hashed(regions.column(map(_REGION, slices))),
        "regions": list(regions),
        "offsets": _hashed(list(map(_OFFSET, copies))),
        "destinations": _hashed(places.column(map(_PLACE, copies))),
        "places": list(places),
        "copies": _hashed(forms.column(map(_FORM, copies))),
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
    copied = [copy.slice for copy in chunk.placements]
    if len(copied) == len(slices) and all(map(is_, copied, slices)):
        return None
    index_of = {slice_: index for index, slice_ in enumerate(slices)}
    numbers = list(map(index_of.__getitem__, copied))
    return None if numbers == list(range(len(slices))) else numbers
