"""Tiles: blocks cut into parts of about equal bytes, one for each program of a GPU kernel.

A tile is found by two look-ups: its number gives its block, the block's row all the rest; so the
tables of a large model stay small. Tables are made on the CPU.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rdt_transport.copy_blocks import Axis, Block

__all__ = ["FIELDS", "Kind", "TileTable", "Tiling", "box_side", "tile_tables"]

_BATCH_AXES = 3
_MOST_UNITS = 1 << 16
"""Of a tile: far within what a product of floats divides exactly."""


class Tiling(NamedTuple):
    """How a GPU's work is cut.

    Attributes:
        tile_bytes: that one program moves, about.
        num_warps: of 32 threads, in one program.
        units_per_thread: loads that a thread has under way at once.
    """

    tile_bytes: int = 8 << 10
    num_warps: int = 2
    units_per_thread: int = 4


class Kind(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        width: bytes of a unit.
        is_transposed: units that are neighbours in the source are none in the target.
        is_batched: there are axes beyond a tile's two.
    """

    width: int
    is_transposed: bool
    is_batched: bool


class TileTable(NamedTuple):
    """The blocks of one kind.

    Attributes:
        kind: of them all.
        blocks: int64 [blocks, FIELDS]; see `_row`.
        block_of_tile: int32 [tiles]; a block's tiles are neighbours.
    """

    kind: Kind
    blocks: Tensor
    block_of_tile: Tensor


class _Part(NamedTuple):
    """A block with its axes told apart; a tile covers part of ``rows`` and ``columns``.

    Rows are the runs and columns the units of a run; or, of a transposed block, rows are
    neighbours in the target and columns in the source.
    """

    block: Block
    batch: tuple[Axis, ...]
    rows: Axis
    columns: Axis
    is_transposed: bool


def box_side(width: int) -> int:
    """Rows and columns of a tile of a transposed block."""
    return 64 if width <= 4 else 32


def tile_tables(blocks: Iterable[Block], tiling: Tiling) -> list[TileTable]:
    """The tables of all kinds that occur; a launch each."""
    rows: dict[Kind, list[list[int]]] = {}
    counts: dict[Kind, list[int]] = {}
    for block in blocks:
        for part in _parts(block):
            kind = Kind(block.width, part.is_transposed, bool(part.batch))
            before = counts.setdefault(kind, [0])
            row, num_tiles = _row(part, before[-1], tiling)
            rows.setdefault(kind, []).append(row)
            before.append(before[-1] + num_tiles)
    tables = []
    for kind in sorted(rows):
        num_tiles = torch.tensor(counts[kind]).diff()
        block_of_tile = torch.repeat_interleave(num_tiles).to(torch.int32)
        tables.append(TileTable(kind, torch.tensor(rows[kind]), block_of_tile))
    return tables


def _parts(block: Block) -> list[_Part]:
    axes, width = list(block.axes), block.width
    columns = Axis(block.run_bytes // width, width, width)
    if not axes:
        return [_Part(block, (), Axis(1, 0, 0), columns, False)]
    by_source = min(axes, key=lambda axis: axis.source)
    is_transposed = columns.extent == 1 and width < 16 and by_source is not axes[-1]
    if is_transposed:
        rows, columns = axes.pop(), by_source
        axes.remove(by_source)
    else:
        rows = max(reversed(axes), key=lambda axis: axis.extent)
        axes.remove(rows)
    # What is left is gone through tile by tile; a fourth axis and more, block by block.
    cut = max(len(axes) - _BATCH_AXES, 0)
    return [
        _Part(
            block._replace(
                source_offset=block.source_offset + _sum(at, [a.source for a in axes[:cut]]),
                target_offset=block.target_offset + _sum(at, [a.target for a in axes[:cut]]),
            ),
            tuple(axes[cut:]),
            rows,
            columns,
            is_transposed,
        )
        for at in product(*(range(axis.extent) for axis in axes[:cut]))
    ]


def _sum(indices: Sequence[int], steps: Sequence[int]) -> int:
    return sum(index * step for index, step in zip(indices, steps, strict=True))


FIELDS = 23
"""Numbers of a block's row; the kernels read them by position."""


def _row(part: _Part, first_tile: int, tiling: Tiling) -> tuple[list[int], int]:
    """A block as the kernels read it, and how many tiles it has. Steps in a tile are in units."""
    block, batch, rows, columns, is_transposed = part
    width = block.width
    if is_transposed:
        tile_rows = tile_columns = box_side(width)
    else:
        most = min(tiling.tile_bytes // width, _MOST_UNITS)
        across = -(-columns.extent // most)
        tile_columns = -(-columns.extent // across)
        tile_rows = max(most // columns.extent, 1)
    across = -(-columns.extent // tile_columns)
    down = -(-rows.extent // tile_rows)
    batch = (*(Axis(1, 0, 0),) * (_BATCH_AXES - len(batch)), *batch)
    row = [
        block.source,  # 0
        block.target,
        block.source_offset,  # in bytes, as bases need not be aligned themselves
        block.target_offset,
        first_tile,  # 4
        across,
        across * down,
        tile_rows,
        tile_columns,  # 8
        rows.extent,  # 9
        rows.source // width,
        rows.target // width,
        columns.extent,  # 12
        columns.source // width,
        columns.target // width,
        batch[1].extent,  # 15
        batch[2].extent,
        *(axis.source for axis in batch),  # 17, 18, 19: in bytes
        *(axis.target for axis in batch),  # 20, 21, 22
    ]
    return row, across * down * prod(axis.extent for axis in batch)
