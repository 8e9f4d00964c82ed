"""What a storage stands for while a loader runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rdt_bake.destinations import DestinationStorage
from rdt_bake.layouts import MAX_PIECES, Dim, Layout, Piece, join_dims

__all__ = [
    "Computed",
    "Constant",
    "Copied",
    "Origin",
    "Source",
    "SourceRegion",
]


@dataclass(slots=True, eq=False)
class Source:
    """The storage of one source tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class SourceRegion:
    """Elements of a source, dim by dim beside those of a view that stands for them.

    Attributes:
        name: the source's name.
        dtype: what the source is viewed as.
        offset: first element, in elements of ``dtype``.
        start: that element's index in the view.
        steps: per dim, (dim of the view it moves along, step in that dim).
        shape: extents.
        stride: strides in the source; 0 repeats.
    """

    name: str
    dtype: torch.dtype
    offset: int
    start: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def inside(self, piece: Piece) -> "SourceRegion":
        """The same elements beside the view that ``piece`` is a part of, not beside the piece."""
        start = list(piece.start)
        for at, (axis, step) in zip(self.start, piece.steps, strict=True):
            start[axis] += at * step
        steps = [(piece.steps[dim][0], piece.steps[dim][1] * step) for dim, step in self.steps]
        return replace(self, start=tuple(start), steps=tuple(steps))

    def of_items(self, axis: int, dtype: torch.dtype) -> "SourceRegion | None":
        """A region of bytes as one of ``dtype``; ``axis`` is the view's dim over an item's bytes.

        None when the bytes of an item do not lie together in the source.
        """
        item, whole = dtype.itemsize, self
        if item > 1:
            if not self.steps or (self.steps[-1], self.shape[-1], self.stride[-1]) != (
                (axis, 1),
                item,
                1,
            ):
                return None
            whole = replace(
                self, steps=self.steps[:-1], shape=self.shape[:-1], stride=self.stride[:-1]
            )
        split = any(dim == axis for dim, _ in whole.steps)
        if split or whole.offset % item or any(step % item for step in whole.stride):
            return None
        return replace(
            whole,
            dtype=dtype,
            offset=whole.offset // item,
            start=whole.start[:-1],
            stride=tuple(step // item for step in whole.stride),
        )


class Copied:
    """A storage that holds a copy of a view (``clone``, ``contiguous``, a cast), from its start on.

    Args:
        parent: what holds the viewed elements.
        viewed: the view's dtype.
        dtype: the copy's own; differs from ``viewed`` when the copy is a cast.
        offset: the view's first element in the parent, in elements of ``viewed``.
        dims: per dim (extent, stride in the copy, stride in the parent).
        op: the operation that copied.
        where: ``file:line`` of the loader.

    Raises:
        ValueError: the copy overlaps itself.
    """

    __slots__ = ("_dims", "_layout", "_offset", "_parent", "_viewed", "dtype", "op", "where")

    def __init__(
        self,
        parent: "Source | Copied",
        viewed: torch.dtype,
        dtype: torch.dtype,
        offset: int,
        dims: Sequence[Dim],
        op: str,
        where: str,
    ) -> None:
        ordered = sorted(dims, key=lambda d: d[1], reverse=True)
        self._dims = join_dims(ordered)
        self._layout = Layout([d[0] for d in self._dims], [d[1] for d in self._dims])
        self._parent, self._viewed, self._offset = parent, viewed, offset
        self.dtype, self.op, self.where = dtype, op, where

    @property
    def name(self) -> str:
        """The source's name."""
        return self._parent.name

    @property
    def is_cast(self) -> bool:
        """Whether its values went through a cast; then only its own dtype can be looked through."""
        return self.dtype != self._viewed or (
            isinstance(self._parent, Copied) and self._parent.is_cast
        )

    def regions(
        self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> tuple[SourceRegion, ...] | None:
        """What a view of the copy stands for; None when that is not a few regions of the source."""
        if self.is_cast and dtype != self.dtype:
            return None
        if dtype.itemsize != self.dtype.itemsize:
            return self._regions_of_bytes(dtype, offset, shape, stride)
        pieces = self._layout.trace(offset, shape, stride)
        if pieces is None:
            return None
        there = [d[2] for d in self._dims]
        viewed = self._viewed if dtype == self.dtype else dtype
        found: list[SourceRegion] = []
        for piece in pieces:
            first = self._offset + _dot(piece.index, there)
            strides = tuple(_dot(move, there) for move in piece.moves)
            if isinstance(self._parent, Source):
                parts: tuple[SourceRegion, ...] | None = (
                    SourceRegion(
                        self._parent.name,
                        viewed,
                        first,
                        piece.start,
                        piece.steps,
                        piece.shape,
                        strides,
                    ),
                )
            else:
                parts = self._parent.regions(viewed, first, piece.shape, strides)
                parts = parts and tuple(part.inside(piece) for part in parts)
            if parts is None or len(found) + len(parts) > MAX_PIECES:
                return None
            found += parts
        return tuple(found)

    def _regions_of_bytes(
        self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> tuple[SourceRegion, ...] | None:
        """Like `regions`, for a view whose elements are larger or smaller than the copy's."""
        own, item = self.dtype.itemsize, dtype.itemsize
        dims = [(n, here * own, there * own) for n, here, there in self._dims]
        in_bytes = Copied(
            self._parent,
            torch.uint8,
            torch.uint8,
            self._offset * own,
            [*dims, (own, 1, 1)],
            self.op,
            self.where,
        )
        found = in_bytes.regions(
            torch.uint8, offset * item, (*shape, item), [*(step * item for step in stride), 1]
        )
        if found is None:
            return None
        whole = [region.of_items(len(shape), dtype) for region in found]
        return None if None in whole else tuple(region for region in whole if region is not None)


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))


@dataclass(slots=True, eq=False)
class Constant:
    """A storage whose every element is one number the loader chose."""

    value: bool | int | float


@dataclass(slots=True, eq=False)
class Computed:
    """A storage whose values are no region of a source.

    Attributes:
        op: the operation that made them.
        where: ``file:line`` of the loader.
        weight: a source they come from, or else the weight that was being loaded.
        derived: whether they come from a source at all.
    """

    op: str
    where: str
    weight: str | None
    derived: bool


Origin = Source | Copied | Constant | Computed | DestinationStorage
