"""Meshes: how the owners of one tensor cut it among themselves.

A mesh arranges a name's owners in row-major order. Along each of its axes they hold equal parts of
the tensor (`replicate`) or cut one of its dims (`shard`) as ``torch.chunk`` does: pieces of one
size, of which the last may be short or empty. Every piece is a `Box`, and all boxes are the cells
of one `Grid`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, product
from operator import mul
from typing import NamedTuple

from rdt_plan.errors import OwnershipError

__all__ = ["AxisPlacement", "Box", "Cell", "Grid", "grid_of"]

Cell = tuple[int, ...]
"""Position of a box in its grid: one index a dim."""

_SPELLING = re.compile(r"replicate|shard\((0|[1-9][0-9]{0,3})(?:,([1-9][0-9]{0,8}))?\)", re.ASCII)


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """What lies along one axis of a mesh.

    Attributes:
        dim: the tensor's dim that the axis cuts, from 0; None when its ranks hold equal parts.
        split_factor: how many pieces later axes have cut the dim into before this one does.
            1 is torch's ``Shard``: outer axes cut first. Larger is its ``_StridedShard``, as of
            FSDP2 over tensor parallelism, which cuts first although its axis is the inner one.

    >>> [str(AxisPlacement(None)), str(AxisPlacement(0)), str(AxisPlacement(0, split_factor=8))]
    ['replicate', 'shard(0)', 'shard(0,8)']
    """

    dim: int | None
    split_factor: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "replicate"
        return f"shard({self.dim}{f',{self.split_factor}' if self.split_factor > 1 else ''})"

    @classmethod
    def parse(cls, text: str) -> "AxisPlacement":
        """Read the one spelling of a placement; raises `OwnershipError` for any other text.

        >>> AxisPlacement.parse("shard(1)")
        AxisPlacement(dim=1, split_factor=1)
        """
        found = _SPELLING.fullmatch(text)
        if found is None or found[2] == "1":
            raise OwnershipError(
                f"expected 'replicate', 'shard(DIM)' or 'shard(DIM,SPLIT_FACTOR)' with a dim from "
                f"0 and a factor from 2 for each mesh axis, found {text!r}"
            )
        if found[1] is None:
            return cls(None)
        return cls(int(found[1]), int(found[2] or 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        start: its first index, one a dim.
        shape: its extents; none is 0, but where the whole tensor has no elements.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """All boxes of one tensor.

    Attributes:
        borders: a dim: where its pieces begin, and its extent last; strictly ascending.
        cells: an owner, in mesh order: the cell it holds; None when its piece is empty.
    """

    borders: tuple[tuple[int, ...], ...]
    cells: tuple[Cell | None, ...]

    def box(self, cell: Cell) -> Box:
        """The part of the tensor that ``cell`` is."""
        spans = [b[i : i + 2] for b, i in zip(self.borders, cell, strict=True)]
        return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@lru_cache(maxsize=4096)
def grid_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[str, ...]
) -> Grid:
    """The boxes of a tensor of ``shape`` over a mesh with one placement an axis.

    Raises:
        OwnershipError: a mesh without one placement an axis; a placement that cannot be read, or
            that names a dim the tensor lacks; a split factor that is not the number of pieces
            some later axes make; a strided shard whose pieces are no boxes, or not the same in
            torch's description and in what FSDP2 holds.

    >>> grid = grid_of((5, 4), (2, 2), ("shard(0)", "replicate"))
    >>> grid.borders, grid.cells
    (((0, 3, 5), (0, 4)), ((0, 0), (0, 0), (1, 0), (1, 0)))
    """
    if len(mesh_shape) != len(placements) or min(mesh_shape, default=1) < 1:
        raise OwnershipError(
            f"expected a mesh of extents from 1 with one placement an axis, found {mesh_shape=} "
            f"and {placements=}"
        )
    axes = [AxisPlacement.parse(text) for text in placements]
    if any(axis.dim is not None and axis.dim >= len(shape) for axis in axes):
        raise OwnershipError(f"expected {placements=} to cut dims of {shape=}")
    spans = []
    for position in product(*map(range, mesh_shape)):
        cuts: list[list[_Cut]] = [[] for _ in shape]
        for axis, size, index in zip(axes, mesh_shape, position, strict=True):
            if axis.dim is not None:
                cuts[axis.dim].append(_Cut(size, axis.split_factor, index))
        spans.append([_span(*each) for each in zip(shape, cuts, strict=True)])
    borders = tuple(
        (*sorted({start for start, stop in column if start < stop}), extent)
        for extent, *column in zip(shape, *spans, strict=True)
    )
    cells = (
        tuple(starts.index(start) for starts, (start, _) in zip(borders, owned, strict=True))
        if all(start < stop for start, stop in owned)
        else None
        for owned in spans
    )
    return Grid(borders, tuple(cells))


class _Cut(NamedTuple):
    """One axis that cuts a dim, and where an owner is on it."""

    size: int
    split_factor: int
    index: int


Span = tuple[int, int]


def _span(extent: int, cuts: Sequence[_Cut]) -> Span:
    """What an owner holds of a dim: the pieces of pieces, in the order the axes cut in."""
    order: list[_Cut] = []
    for cut in reversed(cuts):
        made = list(accumulate((each.size for each in order), mul, initial=1))
        if cut.split_factor not in made:
            raise OwnershipError(
                f"expected split factors that later axes of the mesh make on the same dim, of "
                f"{made}, found {cut.split_factor}; declare the whole mesh that cuts the tensor"
            )
        order.insert(made.index(cut.split_factor), cut)
    held = [(0, extent)]
    for cut in order:
        held = _piece(held, cut.size, cut.index)
    if any(cut.split_factor > 1 for cut in cuts):
        described = _described(extent, cuts)
        if described != held:
            raise OwnershipError(
                f"expected strided shards that cut {extent} rows into equal pieces: of the axes "
                f"{list(cuts)} torch describes rows {described}, where FSDP2 holds rows {held}; "
                f"gather the tensor whole on its owners, or choose sizes that divide"
            )
    return held[0] if held else (0, 0)


def _described(extent: int, cuts: Iterable[_Cut]) -> list[Span]:
    """What torch's placements describe, read from the outer axis to the inner one."""
    rows = [(0, extent)]
    for size, split_factor, index in cuts:
        pieces = [_piece(rows, split_factor, each) for each in range(split_factor)]
        rows = []
        for start, stop in chain.from_iterable(_piece(each, size, index) for each in pieces):
            if rows and rows[-1][1] == start:
                start = rows.pop()[0]
            rows.append((start, stop))
    return rows


def _piece(rows: Sequence[Span], count: int, index: int) -> list[Span]:
    """Piece ``index`` of the ``count`` that ``torch.chunk`` makes of ``rows``; [] when empty."""
    width = -(-sum(stop - start for start, stop in rows) // count)
    low, high = index * width, (index + 1) * width
    taken = []
    for start, stop in rows:
        first, last = start + max(low, 0), min(stop, start + high)
        if first < last:
            taken.append((first, last))
        low, high = low - (stop - start), high - (stop - start)
    return taken
