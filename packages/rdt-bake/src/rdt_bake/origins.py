"""What a storage stands for while a loader runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rdt_bake.destinations import DestinationStorage
from rdt_bake.layouts import MAX_PIECES, Dim, Layout, join_dims
from rdt_bake.source_regions import SourceRegion
from rdt_plan import ParamMeta
from rdt_plan.slices import contiguous_stride

__all__ = [
    "Brought",
    "Computed",
    "Constant",
    "Copied",
    "Origin",
    "Source",
    "View",
]


@dataclass(slots=True, eq=False)
class Source:
    """The storage of one source tensor.

    Attributes:
        name: the source's name.
        meta: the whole of it.
    """

    name: str
    meta: ParamMeta

    @property
    def whole(self) -> "View":
        """All of it."""
        dtype, shape = getattr(torch, self.meta.dtype), self.meta.shape
        return View(self, dtype, 0, shape, contiguous_stride(shape))


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

    __slots__ = (
        "_dims",
        "_layout",
        "_offset",
        "_own_dims",
        "_viewed",
        "dtype",
        "op",
        "parent",
        "where",
    )

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
        self._own_dims = sorted(dims, key=lambda d: d[1], reverse=True)
        self._dims = join_dims(self._own_dims)
        self._layout = Layout([d[0] for d in self._dims], [d[1] for d in self._dims])
        self._viewed, self._offset = viewed, offset
        self.parent, self.dtype, self.op, self.where = parent, dtype, op, where

    @property
    def name(self) -> str:
        """The source's name."""
        return self.parent.name

    @property
    def whole(self) -> "View":
        """All of the copy, its dims in memory order."""
        shape, stride = tuple(d[0] for d in self._own_dims), tuple(d[1] for d in self._own_dims)
        return View(self, self.dtype, 0, shape, stride)

    @property
    def viewed(self) -> "View":
        """What was copied, dim by dim beside those of `whole`."""
        shape, stride = tuple(d[0] for d in self._own_dims), tuple(d[2] for d in self._own_dims)
        return View(self.parent, self._viewed, self._offset, shape, stride)

    @property
    def is_cast(self) -> bool:
        """Whether its values went through a cast; then only its own dtype can be looked through."""
        return self.dtype != self._viewed or (
            isinstance(self.parent, Copied) and self.parent.is_cast
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
            if isinstance(self.parent, Source):
                parts: tuple[SourceRegion, ...] | None = (
                    SourceRegion(
                        self.parent.name,
                        viewed,
                        first,
                        piece.start,
                        piece.steps,
                        piece.shape,
                        strides,
                    ),
                )
            else:
                parts = self.parent.regions(viewed, first, piece.shape, strides)
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
            self.parent,
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
    """A storage whose every element is one number the loader chose.

    Attributes:
        value: the number.
        dtype, shape, stride: of the tensor that was made so.
    """

    value: bool | int | float
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Computed:
    """A storage whose values are no region of a source.

    Attributes:
        op: the operation that made them.
        where: ``file:line`` of the loader.
        weight: a source they come from, or else the weight that was being loaded.
        derived: whether they come from a source at all.
        dtype, shape, stride: of the tensor that was made.
    """

    op: str
    where: str
    weight: str | None
    derived: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Brought:
    """A tensor of values that come from no weight, as they were when an operation used them.

    Attributes:
        values: a contiguous copy on the CPU; None when it is larger than `MAX_BROUGHT_BYTES`, or
            when they are lost.
        is_lost: whether torch put them on the meta device, out of sight (`LostValues`).
    """

    values: Tensor | None
    is_lost: bool


Origin = Source | Copied | Constant | Computed | DestinationStorage


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor saw what its storage stood for.

    Attributes:
        origin: what the storage stood for.
        dtype: the tensor's.
        offset: its first element, in elements of ``dtype`` from the storage's start.
        shape: extents.
        stride: one a dim, in elements of ``dtype``; 0 repeats.
    """

    origin: Origin | Brought
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def cut(self, dim: int, start: int, stop: int) -> "View":
        """Indices ``start`` to ``stop`` of one dim, ``stop`` not counted."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        offset = self.offset + start * self.stride[dim]
        return View(self.origin, self.dtype, offset, shape, self.stride)

    def every(self, dim: int, step: int) -> "View":
        """The same number of indices of one dim, ``step`` apart."""
        stride = (*self.stride[:dim], self.stride[dim] * step, *self.stride[dim + 1 :])
        return View(self.origin, self.dtype, self.offset, self.shape, stride)
