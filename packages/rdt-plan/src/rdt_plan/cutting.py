"""Cutting: a slice and everything that is copied from it, in pieces that fit a byte cap."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

from rdt_plan.dtypes import item_bytes
from rdt_plan.placement import Placement
from rdt_plan.slices import Slice, canonical, contiguous_stride

__all__ = ["Piece", "cut", "in_order"]

Piece = tuple[Slice, tuple[Placement, ...]]
"""A slice and the copies made from it."""


@dataclass(frozen=True, slots=True)
class _Region:
    """A strided region whose outermost dim, if it has one, has more than one element."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, offset: int, shape: Sequence[int], stride: Sequence[int]) -> "_Region":
        dims = [(e, s) for e, s in zip(shape, stride, strict=True) if e != 1]
        return cls(offset, tuple(e for e, _ in dims), tuple(s for _, s in dims))

    def rows(self, start: int, count: int) -> "_Region":
        """``count`` of its outermost rows."""
        return _Region.of(
            self.offset + start * self.stride[0], (count, *self.shape[1:]), self.stride
        )


def cut(slice_: Slice, placements: Iterable[Placement], max_bytes: int) -> list[Piece]:
    """Cut ``slice_`` and its ``placements`` together, in order, into pieces of ``max_bytes``.

    The source and every destination iterate over the same elements, each with dims of its own;
    they can be cut between two elements where a row begins in all of them. Rows are cut first,
    then, if one row is still too large, the rows of that row, and so on.

    A piece may exceed ``max_bytes`` when it is a single element, when a placement repeats or
    reorders the packed elements (such slices stay whole), or when no common row boundary exists.

    >>> from rdt_plan import Slice
    >>> for piece, _ in cut(Slice("w", "int8", 0, (5, 4), (8, 1)), (), max_bytes=8):
    ...     print(piece.offset, piece.shape)
    0 (2, 4)
    16 (2, 4)
    32 (4,)
    """
    placements = tuple(placements)
    if slice_.num_bytes <= max_bytes or not all(map(in_order, placements)):
        return [(slice_, placements)]
    regions = [_Region.of(r.offset, r.shape, r.stride) for r in (slice_, *placements)]
    max_numel = max(max_bytes // item_bytes(slice_.dtype), 1)
    pieces = []
    for source, *destinations in _pieces(regions, slice_.numel, max_numel):
        piece = canonical(slice_.name, slice_.dtype, source.offset, source.shape, source.stride)
        pieces.append(
            (
                piece,
                tuple(
                    placement._replace(
                        slice=piece,
                        offset=region.offset,
                        shape=region.shape,
                        stride=region.stride,
                        source_stride=contiguous_stride(region.shape),
                    )
                    for placement, region in zip(placements, destinations, strict=True)
                ),
            )
        )
    return pieces


def in_order(placement: Placement) -> bool:
    """Whether it reads every packed element once, in order."""
    return prod(placement.shape) == placement.slice.numel and all(
        extent == 1 or stride == step
        for extent, stride, step in zip(
            placement.shape,
            placement.source_stride,
            contiguous_stride(placement.shape),
            strict=True,
        )
    )


def _pieces(regions: list[_Region], numel: int, max_numel: int) -> Iterator[list[_Region]]:
    """The pieces of regions of ``numel`` elements each, in order of iteration."""
    if numel <= max_numel:
        yield regions
        return
    row_numels = [numel // region.shape[0] for region in regions]
    unit = lcm(*row_numels)  # the fewest elements that are whole rows in every region
    if unit == numel:
        yield regions
        return
    step = max(max_numel // unit, 1) * unit
    for start in range(0, numel, step):
        count = min(step, numel - start)
        rows = [
            region.rows(start // row_numel, count // row_numel)
            for region, row_numel in zip(regions, row_numels, strict=True)
        ]
        yield from _pieces(rows, count, max_numel)
