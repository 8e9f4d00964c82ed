"""Regions of a source, beside the views that stand for them."""

from dataclasses import dataclass, replace

import torch

from rdt_bake.layouts import Piece

__all__ = ["SourceRegion"]


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
