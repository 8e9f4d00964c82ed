"""A copy from one of the model's tensors to another, as the copies that filled the first one.

A loader that ties an output layer to an embedding by copying reads what it has loaded before. What
was read came from weights and numbers, so the second tensor can be filled from those as well.
"""

from collections.abc import Sequence

from torch import Tensor

from rdt_bake.destinations import DestinationStorage
from rdt_bake.landings import Ints, Landing, joined, region_of
from rdt_bake.layouts import Layout, Piece
from rdt_bake.overlaps import missing_regions
from rdt_bake.regions import Region
from rdt_bake.tensors import first_element

__all__ = ["passed_on"]


def passed_on(
    landings: Sequence[Landing],
    origin: DestinationStorage,
    storage: DestinationStorage,
    into: Tensor,
    value: Tensor,
) -> list[Landing] | None:
    """What lands in ``into`` when ``value``, a view of ``origin`` as it is now, is copied there.

    None when that is not a few copies and numbers: something computed is in ``origin``, or nothing
    has been written to a part of ``value``, or the copy casts.

    Args:
        landings: all so far, in order.
        origin: the storage that is read.
        storage: another one, which is written.
        into, value: of equal shapes.
    """
    if origin.programmed or value.dtype != into.dtype:
        return None
    item, start = value.dtype.itemsize, first_element(value)
    try:
        layout = Layout(value.shape, value.stride())
    except ValueError:
        return None
    left = [region_of(value.dtype, start, value.shape, value.stride(), item)]
    found: list[Landing] = []
    for landing in reversed(landings):  # the last to write an element wins
        if not left:
            break
        if landing.storage is not origin:
            continue
        if landing.dtype != value.dtype:
            return None
        written, still_left = landing.region(item), list[Region]()
        for region in left:
            (missing,) = missing_regions([written], [region])
            still_left += missing
            if missing == (region,):
                continue
            (taken,) = missing_regions(missing, [region])
            for part in taken:
                pieces = landing.within(part)
                if pieces is None:
                    return None
                for each in pieces:
                    lies = layout.trace(each.offset - start, each.shape, each.stride)
                    if lies is None:
                        return None
                    found += [_beside(each, piece, storage, into) for piece in lies]
        left = still_left
    return None if left else found


def _beside(landing: Landing, piece: Piece, storage: DestinationStorage, into: Tensor) -> Landing:
    """The part of ``landing`` that ``piece`` is, where it lies in ``into``."""
    steps = into.stride()
    read = landing.source_stride or (0,) * len(landing.shape)
    own = tuple(_dot(move, steps) for move in piece.moves)
    there = tuple(read[axis] * step for axis, step in piece.steps)
    shape, stride, source_stride = joined(piece.shape, own, there)
    return Landing(
        storage,
        into.dtype,
        first_element(into) + _dot(piece.index, steps),
        shape,
        stride,
        landing.weight,
        landing.value,
        landing.source_dtype,
        landing.source_offset + _dot(piece.start, read),
        () if landing.is_fill else source_stride,
    )


def _dot(left: Sequence[int], right: Ints) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
