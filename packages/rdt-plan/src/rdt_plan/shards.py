"""Shards: a slice and everything that is copied from it, in pieces that lie in one box each.

A piece is a slice of what the box's owners hold, a contiguous tensor of the box's shape, so packing
and checking it is the same as for a tensor held whole.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from rdt_plan._walks import Loop, Walk, split
from rdt_plan.cutting import Piece
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import OwnershipError, SliceError
from rdt_plan.mesh import Cell, grid_of
from rdt_plan.placement import Placement, new_placement
from rdt_plan.slices import Slice, canonical, contiguous_stride, new_slice

if TYPE_CHECKING:
    from rdt_plan.manifest import ParamMeta

__all__ = ["Share", "cut_at_borders", "pieces_of", "shares_of"]

Dims = tuple[tuple[int, tuple[int, ...]], ...]
"""For each dim of a tensor: after how many elements it repeats, and its borders in elements."""


def cut_at_borders(
    slice_: Slice, placements: Sequence[Placement], meta: "ParamMeta"
) -> list[tuple[Cell, Piece]]:
    """Cut ``slice_`` of ``meta`` and its ``placements`` together, at the borders of its boxes.

    The pieces of a cell read what its owners hold: their offsets and strides count in a contiguous
    tensor of the box's shape. No element is in two pieces, and a piece that no placement reads is
    left out. Rows, columns, narrowed and transposed slices give one piece a box.

    Raises:
        SliceError: a border lies within an element of the slice's dtype.

    >>> from rdt_plan import ParamMeta, whole
    >>> meta = ParamMeta("w", "int8", (2, 6), (0, 1), (2,), ("shard(1)",))
    >>> copy = Placement(whole(meta), "m", "p", 0, (2, 6), (6, 1), "int8", (6, 1))
    >>> for cell, (piece, (part,)) in cut_at_borders(copy.slice, [copy], meta):
    ...     print(cell, piece.shape, part.offset, part.shape, part.stride)
    (0, 0) (6,) 0 (2, 3) (6, 1)
    (0, 1) (6,) 3 (2, 3) (6, 1)
    """
    return pieces_of(slice_, placements, shares_of(slice_, placements, meta))


def shares_of(
    slice_: Slice, placements: Sequence[Placement], meta: "ParamMeta"
) -> tuple["Share", ...]:
    """How `cut_at_borders` cuts them: the same for all that differ in names and destinations only.

    Neither the name counts, nor whose tensor a placement writes into, from which offset on.
    """
    name, dtype, offset, shape, stride = slice_
    if not meta.mesh_shape:
        raise OwnershipError(f"{name!r} is held whole: expected a mesh that cuts it")
    try:
        dims = _dims(dtype, meta.dtype, meta.shape, meta.mesh_shape, meta.placements)
    except SliceError as error:
        raise SliceError(f"{name!r}: {error}") from None
    return _shares(
        dims,
        (offset, shape, stride),
        tuple([(copy.shape, copy.source_stride, copy.stride) for copy in placements]),
    )


def pieces_of(
    slice_: Slice, placements: Sequence[Placement], shares: Sequence["Share"]
) -> list[tuple[Cell, Piece]]:
    """The pieces of ``slice_`` and its ``placements``, cut as ``shares`` say."""
    name, dtype = slice_[:2]
    pieces = []
    for cell, region, copies in shares:  # one turn for each piece of a model
        piece = new_slice((name, dtype, *region))
        landed = []
        for number, twin, shape, source_stride, stride in copies:
            _, module, param, at, _, _, copied_dtype, _ = placements[number]
            copy = (piece, module, param, at + twin, shape, stride, copied_dtype, source_stride)
            landed.append(new_placement(copy))
        pieces.append((cell, (piece, tuple(landed))))
    return pieces


@lru_cache(maxsize=4096)
def _dims(
    slice_dtype: str,
    dtype: str,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[str, ...],
) -> Dims:
    """Periods and borders of each dim of a sharded tensor, in elements of the slice's dtype."""
    grid = grid_of(shape, mesh_shape, placements)
    item = item_bytes(slice_dtype)
    row_bytes = [step * item_bytes(dtype) for step in contiguous_stride(shape)]
    dims = []
    for dim, (borders, num_bytes) in enumerate(zip(grid.borders, row_bytes, strict=True)):
        *inner, period = [border * num_bytes for border in borders]
        if prod(shape[:dim]) == 1:  # it never repeats, and may end in part of an element
            period = -(-period // item) * item
        if len(borders) > 2 and any(border % item for border in (*inner, period)):
            raise SliceError(
                f"expected pieces of whole {slice_dtype} elements, found dim {dim} of "
                f"{dtype}{list(shape)} cut at {borders}; view it as {dtype}, or gather the tensor "
                f"whole on its owners"
            )
        dims.append((period // item, tuple(border // item for border in (*inner, period))))
    return tuple(dims)


Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Landing(NamedTuple):
    """What of a copy reads a piece: its number, how much further it lands, its region and steps."""

    number: int
    twin: int
    shape: tuple[int, ...]
    source_stride: tuple[int, ...]
    stride: tuple[int, ...]


class Share(NamedTuple):
    """A piece: its cell, what it reads there, in canonical spelling, and the copies from it."""

    cell: Cell
    region: Region
    copies: tuple[_Landing, ...]


@lru_cache(maxsize=4096)  # a model's layers are alike
def _shares(
    dims: Dims,
    source: Region,
    copies: tuple[tuple[tuple[int, ...], ...], ...],
) -> tuple[Share, ...]:
    """The pieces of a region of a tensor and of what is copied from its packed elements."""
    offset, shape, stride = source
    walk = _walk(offset, shape, stride, contiguous_stride(shape))
    parts: list[tuple[Cell, Walk]] = [((), walk)]
    for period, borders in dims:
        parts = [
            ((*cell, interval), part)
            for cell, walk in parts
            for interval, part in (
                split(walk, period, borders) if len(borders) > 2 else [(0, walk)]
            )
        ]
    targets = [_walk(0, *copy) for copy in copies]
    numel = prod(shape)
    shares = []
    parts.reverse()
    while parts:
        cell, part = parts.pop()
        landed = [
            (number, walk)
            for number, target in enumerate(targets)
            for walk in _within(target, part, numel)
        ]
        # A copy reads its packed slice from the first element on.
        starts = sorted({walk.at for _, walk in landed if walk.at})
        if starts:
            ends = [_packed(part, start) for start in starts]
            parts += [(cell, each) for each in reversed(_parted(part, ends, numel))]
        elif landed:
            copied = [
                _Landing(number, walk.twin, *_columns(_merged(walk))) for number, walk in landed
            ]
            shares.append(Share(cell, _region(part), tuple(copied)))
    return tuple(shares)


def _region(walk: Walk) -> Region:
    shape, stride, _ = _columns(walk)
    return canonical("", "", walk.at, shape, stride)[2:]


def _walk(at: int, shape: Sequence[int], stride: Sequence[int], twin_stride: Sequence[int]) -> Walk:
    loops = map(Loop, shape, stride, twin_stride)
    return Walk(at, 0, tuple(loop for loop in loops if loop.times > 1))


def _merged(walk: Walk) -> Walk:
    """The same walk in the fewest loops: a run of bytes in a run of bytes is one."""
    loops: list[Loop] = []
    for loop in walk.loops:
        if loops and loops[-1][1:] == (loop.step * loop.times, loop.twin_step * loop.times):
            loops[-1] = loop._replace(times=loops[-1].times * loop.times)
        else:
            loops.append(loop)
    return walk._replace(loops=tuple(loops))


def _columns(walk: Walk) -> tuple[tuple[int, ...], ...]:
    """Shape, steps and twin steps of a walk."""
    return tuple(zip(*walk.loops, strict=True)) if walk.loops else ((), (), ())


def _within(walk: Walk, part: Walk, numel: int) -> Iterator[Walk]:
    """The parts of ``walk``, over packed elements, that lie in ``part``; counted in that alone.

    The packed elements of a part are its twin positions: digits of a number, one a loop.
    """
    walks = [walk]
    start, period = part.twin, numel
    for number, (times, _, step) in enumerate(part.loops):
        inner = sum((loop.times - 1) * loop.twin_step for loop in part.loops[number + 1 :])
        rest = start % step
        if rest + inner >= step or start - rest + times * step > period:
            rest = max(start + times * step - period, 0)
        walks = _kept(walks, start - rest, times * step, period)
        start, period = rest, step
    return iter(_kept(walks, start, 1, period))


def _kept(walks: Sequence[Walk], start: int, width: int, period: int) -> list[Walk]:
    """What of ``walks`` lies in the ``width`` positions from ``start`` on in each period."""
    borders = sorted({0, start, start + width, period})
    wanted = borders.index(start)
    return [part for walk in walks for at, part in split(walk, period, borders) if at == wanted]


def _packed(part: Walk, number: int) -> int:
    """The packed element that is element ``number`` of ``part``."""
    at = part.twin
    for loop in reversed(part.loops):
        number, turn = divmod(number, loop.times)
        at += turn * loop.twin_step
    return at


def _parted(part: Walk, starts: Sequence[int], numel: int) -> list[Walk]:
    """``part`` cut before each of the packed elements ``starts``."""
    borders = (0, *starts, numel)
    packed = Walk(part.twin, part.at, tuple(Loop(n, twin, step) for n, step, twin in part.loops))
    return [
        Walk(
            each.twin,
            each.at + borders[interval],
            tuple(Loop(n, step, twin) for n, twin, step in each.loops),
        )
        for interval, each in split(packed, numel, borders)
    ]
