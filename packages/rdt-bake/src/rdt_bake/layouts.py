"""Nested layouts, and where a strided view of one lies in its dims.

A tensor made by copying a region (``contiguous``, ``clone``) has a layout of its own, and each of
its elements stands for one element of the region. A `Layout` says, for any strided view of such a
tensor, which indices of its dims the view touches, as few *pieces* that step evenly through
the dims; with the region's strides beside the dims, a piece is a strided part of the region.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_PIECES", "Dim", "Layout", "Piece", "join_dims"]

MAX_PIECES = 64
"""A view that falls into more pieces than this is given up."""

Dim = tuple[int, int, int]
"""(extent, stride in one tensor, stride in another): a dim two tensors are walked along at once."""


def join_dims(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """``dims`` without those of extent 1, and with neighbours that iterate as one merged.

    >>> join_dims([(2, 6, 60), (1, 9, 9), (3, 2, 20), (2, 1, 1)])
    ((6, 2, 20), (2, 1, 1))
    """
    joined: list[Dim] = []
    for extent, here, there in dims:
        if extent == 1:
            continue
        if joined:
            outer, outer_here, outer_there = joined[-1]
            if outer_here == extent * here and outer_there == extent * there:
                joined[-1] = (outer * extent, here, there)
                continue
        joined.append((extent, here, there))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a view that steps evenly through the dims of a layout.

    Attributes:
        start: the first element's index in the view, one entry a dim of the view.
        steps: per dim of the piece, (dim of the view it moves along, step in that dim).
        shape: the piece's extents.
        index: the first element's index in the layout.
        moves: per dim of the piece, how far one step moves along each dim of the layout.
    """

    start: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Half-open range of indices the piece touches, per dim of the layout."""
        ends = [
            first + sum((n - 1) * move[dim] for n, move in zip(self.shape, self.moves, strict=True))
            for dim, first in enumerate(self.index)
        ]
        return tuple((lo, hi + 1) for lo, hi in zip(self.index, ends, strict=True))


@dataclass(frozen=True, slots=True)
class _Run:
    """A dim of a view being traced: ``extent`` elements, ``stride`` apart."""

    axis: int
    extent: int
    step: int
    stride: int
    moves: tuple[int, ...]

    def part(self, extent: int) -> "tuple[_Run, ...]":
        if extent == 1:
            return ()
        return (_Run(self.axis, extent, self.step, self.stride, self.moves),)


class Layout:
    """Extents and strides of a tensor that does not overlap itself.

    Args:
        shape: its extents.
        stride: its strides, in elements, in any order.

    Raises:
        ValueError: the dims do not nest (each must step over the whole extent of the smaller ones).

    >>> rows = Layout((4, 3), (3, 1))
    >>> [piece.spans() for piece in rows.trace(3, (6,), (1,))]
    [((1, 3), (0, 3))]
    >>> len(rows.trace(4, (5,), (1,)))    # ends one row, then a whole row
    2
    """

    __slots__ = ("_extents", "_order", "_strides")

    def __init__(self, shape: Sequence[int], stride: Sequence[int]) -> None:
        self._order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d]), reverse=True)
        self._extents = [shape[d] for d in self._order]
        self._strides = [stride[d] for d in self._order]
        reach = 0
        for extent, step in zip(reversed(self._extents), reversed(self._strides), strict=True):
            if extent != 1 and step <= reach:
                raise ValueError(f"dims do not nest: {tuple(shape)}, {tuple(stride)}")
            reach += (extent - 1) * step

    def trace(
        self, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> tuple[Piece, ...] | None:
        """The view (``offset, shape, stride``) of this tensor, in disjoint pieces.

        Strides of 0 repeat; no extent may be 0. None when there would be more than `MAX_PIECES`,
        or when the view leaves the tensor.
        """
        runs: list[_Run] = []
        for axis, (extent, step) in enumerate(zip(shape, stride, strict=True)):
            if extent != 1:
                moves = self._digits(step)
                if moves is None:
                    return None
                runs.append(_Run(axis, extent, 1, step, moves))
        found: list[Piece] = []
        todo = [((0,) * len(shape), offset, tuple(runs))]
        while todo:
            if len(found) + len(todo) > MAX_PIECES:
                return None
            start, first, parts = todo.pop()
            index = self._digits(first)
            if index is None or any(i >= n for i, n in zip(index, self._extents, strict=True)):
                return None
            parts = self._split(index, parts)
            cut = self._carry(index, parts)
            if cut is None:
                found.append(self._piece(start, index, parts))
                continue
            which, at = cut
            run = parts[which]
            later = list(start)
            later[run.axis] += at * run.step
            before, after = parts[:which], parts[which + 1 :]
            rest = run.part(run.extent - at)
            todo.append((tuple(later), first + at * run.stride, before + rest + after))
            todo.append((start, first, before + run.part(at) + after))
        return tuple(found)

    def _digits(self, position: int) -> tuple[int, ...] | None:
        """How many steps along each dim make ``position``; None if no whole steps do."""
        if position < 0:
            return None
        digits = []
        for extent, step in zip(self._extents, self._strides, strict=True):
            if extent == 1 or step == 0:
                digits.append(0)
                continue
            digit, position = divmod(position, step)
            digits.append(digit)
        return None if position else tuple(digits)

    def _split(self, index: tuple[int, ...], runs: tuple[_Run, ...]) -> tuple[_Run, ...]:
        """``runs`` with each one that wraps around a dim evenly split in two, outer and inner."""
        todo, done = list(reversed(runs)), []
        while todo:
            run = todo.pop()
            lowest = next((d for d in reversed(range(len(index))) if run.moves[d]), None)
            if lowest is not None:
                extent, move = self._extents[lowest], run.moves[lowest]
                inner = extent // move
                even = extent % move == 0 and index[lowest] < move
                if even and 1 < inner < run.extent and run.extent % inner == 0:
                    stride = run.stride * inner
                    moves = self._digits(stride)
                    if moves is not None:
                        outer = run.extent // inner
                        todo.append(_Run(run.axis, inner, run.step, run.stride, run.moves))
                        todo.append(_Run(run.axis, outer, run.step * inner, stride, moves))
                        continue
            done.append(run)
        return tuple(done)

    def _carry(self, index: tuple[int, ...], runs: tuple[_Run, ...]) -> tuple[int, int] | None:
        """Where to cut, as (run, steps), so that less wraps around; None when nothing does."""
        for dim in reversed(range(len(index))):
            extent = self._extents[dim]
            moving = [(which, run) for which, run in enumerate(runs) if run.moves[dim]]
            if index[dim] + sum((run.extent - 1) * run.moves[dim] for _, run in moving) < extent:
                continue
            for which, run in moving:
                move = run.moves[dim]
                if index[dim] + (run.extent - 1) * move >= extent:
                    steps = -(-(extent - index[dim]) // move)
                    if index[dim] < move and extent % move == 0:
                        steps = run.extent // steps * steps  # all whole turns at once
                    return which, steps if 0 < steps < run.extent else run.extent // 2
            which, run = moving[0]
            return which, run.extent // 2
        return None

    def _piece(
        self, start: tuple[int, ...], index: tuple[int, ...], runs: tuple[_Run, ...]
    ) -> Piece:
        def unsorted(digits: tuple[int, ...]) -> tuple[int, ...]:
            natural = [0] * len(digits)
            for dim, digit in zip(self._order, digits, strict=True):
                natural[dim] = digit
            return tuple(natural)

        return Piece(
            start=start,
            steps=tuple((run.axis, run.step) for run in runs),
            shape=tuple(run.extent for run in runs),
            index=unsorted(index),
            moves=tuple(unsorted(run.moves) for run in runs),
        )
