"""Copy tables on a GPU: Triton kernels that read what to copy from tables in its memory.

The only file that may import Triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rdt_transport.copy_blocks import Block
from rdt_transport.copy_tiles import FIELDS, TileTable, Tiling, box_side, tile_tables

__all__ = ["TritonCopies"]


@triton.jit
def _pointer(address, WIDTH: tl.constexpr):
    """A pointer to the integers that units of that width are moved as."""
    if WIDTH == 1:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif WIDTH == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif WIDTH == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:  # the widest are pairs
        pointer = address.to(tl.pointer_type(tl.int64))
    # An address that was loaded is not known to be aligned: units would be moved item by item.
    return tl.multiple_of(pointer, WIDTH)


@triton.jit
def _tile(
    addresses,
    blocks,
    block_of_tile,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BATCHED: tl.constexpr,
):
    """This program's block, both first units, and how many rows and columns are left from there."""
    number = tl.program_id(0)
    block = blocks + tl.load(block_of_tile + number).to(tl.int64) * FIELDS
    at_source = tl.load(addresses + tl.load(block)) + tl.load(block + 2)
    at_target = tl.load(addresses + tl.load(block + 1)) + tl.load(block + 3)
    tile = number - tl.load(block + 4).to(tl.int32)
    if IS_BATCHED:
        each = tl.load(block + 6).to(tl.int32)
        batch = tile // each
        tile -= batch * each
        inner = tl.load(block + 16).to(tl.int32)
        middle = tl.load(block + 15).to(tl.int32)
        last = (batch % inner).to(tl.int64)
        second = (batch // inner % middle).to(tl.int64)
        first = (batch // inner // middle).to(tl.int64)
        at_source += first * tl.load(block + 17) + second * tl.load(block + 18)
        at_target += first * tl.load(block + 20) + second * tl.load(block + 21)
        at_source += last * tl.load(block + 19)
        at_target += last * tl.load(block + 22)
    across = tl.load(block + 5).to(tl.int32)
    down = tile // across
    row = down.to(tl.int64) * tl.load(block + 7)
    column = (tile - down * across).to(tl.int64) * tl.load(block + 8)
    at_source += (row * tl.load(block + 10) + column * tl.load(block + 13)) * WIDTH
    at_target += (row * tl.load(block + 11) + column * tl.load(block + 14)) * WIDTH
    source = _pointer(at_source, WIDTH)
    target = _pointer(at_target, WIDTH)
    return block, source, target, tl.load(block + 9) - row, tl.load(block + 12) - column


@triton.jit
def _copy_runs(
    addresses,
    blocks,
    block_of_tile,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BATCHED: tl.constexpr,
    STEP: tl.constexpr,
):
    block, source, target, rows, columns = _tile(
        addresses, blocks, block_of_tile, FIELDS, LANES, WIDTH, IS_BATCHED
    )
    tile_columns = tl.load(block + 8).to(tl.int32)
    inverse = 1.0 / tile_columns.to(tl.float32)
    rows = tl.minimum(rows, tl.load(block + 7)).to(tl.int32)
    columns = tl.minimum(columns, tile_columns).to(tl.int32)
    source_step = tl.load(block + 10)
    target_step = tl.load(block + 11)
    lanes = tl.arange(0, LANES)[None, :]
    for start in range(0, rows * tile_columns, STEP):
        unit = start + tl.arange(0, STEP)
        # Exact for every unit of a tile. Not by the upper half of a product of integers: ptxas 12.8
        # to 13.0 takes that, times `tile_columns`, for the upper half of a product of all three.
        row = ((unit.to(tl.float32) + 0.5) * inverse).to(tl.int32)
        column = unit - row * tile_columns
        mask = (unit < rows * tile_columns) & (column < columns)
        mask = mask[:, None] & (lanes < LANES)
        read = (row.to(tl.int64) * source_step + column)[:, None] * LANES + lanes
        write = (row.to(tl.int64) * target_step + column)[:, None] * LANES + lanes
        tl.store(target + write, tl.load(source + read, mask=mask), mask=mask)


@triton.jit
def _copy_boxes(
    addresses,
    blocks,
    block_of_tile,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BATCHED: tl.constexpr,
    SIDE: tl.constexpr,
    SOURCE_RUNS: tl.constexpr,
    TARGET_RUNS: tl.constexpr,
):
    block, source, target, rows, columns = _tile(
        addresses, blocks, block_of_tile, FIELDS, LANES, WIDTH, IS_BATCHED
    )
    row = tl.arange(0, SIDE)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    mask = (row < rows) & (column < columns)
    # Steps of 1 are written out where all blocks have them: loads and stores then run along them.
    read = row.to(tl.int64) * tl.load(block + 10)
    write = column.to(tl.int64) * tl.load(block + 14)
    if SOURCE_RUNS:
        read = read + column
    else:
        read = read + column.to(tl.int64) * tl.load(block + 13)
    if TARGET_RUNS:
        write = write + row
    else:
        write = write + row.to(tl.int64) * tl.load(block + 11)
    tl.store(target + write, tl.load(source + read, mask=mask), mask=mask)


class TritonCopies:
    """The copies of some blocks, as one launch for each kind that occurs among them.

    Nothing waits for the device.

    Args:
        blocks: their bases are numbered together, targets after sources.
        device: of all bases.
        tiling: how the work is cut.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device, tiling: Tiling) -> None:
        self._device = device
        self._stream = _current_stream(device)  # all uploads are behind each other on it
        with torch.accelerator.device_index(device.index):
            self._launches = [
                _Launch(table, device, tiling) for table in tile_tables(blocks, tiling)
            ]
        self._addresses = _Addresses(device)

    def run(self, bases: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """Enqueue all copies on the current stream of the device; ``addresses`` are the bases'."""
        with torch.accelerator.device_index(self._device.index):
            stream = _current_stream(self._device)
            if stream is not None and self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
                for launch in self._launches:
                    launch.keep_for(stream)
                self._addresses = _Addresses(self._device)  # memory belongs to one stream
                self._stream = stream
            uploaded = self._addresses.uploaded(addresses)
            for launch in self._launches:
                launch.enqueue(uploaded)


class _Addresses:
    """The bases' addresses on the device, for what is enqueued on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploaded: list[int] = []
        self._host = self._tensor = torch.empty(0, dtype=torch.int64)
        self._sent: torch.Event | None = None

    def uploaded(self, addresses: Sequence[int]) -> Tensor:
        """What kernels enqueued from now on read; right until the next call."""
        if self._uploaded == addresses:
            return self._tensor
        self._uploaded = []  # until they are: what follows may fail
        if self._device.type == "cpu":
            self._tensor = torch.tensor(addresses)
        else:
            self._send(addresses)
        self._uploaded = list(addresses)
        return self._tensor

    def _send(self, addresses: Sequence[int]) -> None:
        if self._sent is None or not self._sent.query():  # the last ones may still be on their way
            self._host = torch.empty(len(addresses), dtype=torch.int64, pin_memory=True)
            self._sent = torch.Event(self._device)
        if self._tensor.numel() != len(addresses):
            self._tensor = torch.empty(len(addresses), dtype=torch.int64, device=self._device)
        self._host.numpy()[:] = addresses
        self._tensor.copy_(self._host, non_blocking=True)
        self._sent.record()


class _Launch:
    """One kernel over the blocks of one kind."""

    def __init__(self, table: TileTable, device: torch.device, tiling: Tiling) -> None:
        width, is_transposed, is_batched = table.kind
        self._tables = _upload(table.blocks, device), _upload(table.block_of_tile, device)
        self._options: dict[str, Any] = {
            "FIELDS": FIELDS,
            "LANES": 2 if width == 16 else 1,
            "WIDTH": width,
            "IS_BATCHED": is_batched,
            "num_warps": tiling.num_warps,
        }
        if is_transposed:
            self._options["SIDE"] = box_side(width)
            self._options["SOURCE_RUNS"] = bool((table.blocks[:, 13] == 1).all())
            self._options["TARGET_RUNS"] = bool((table.blocks[:, 11] == 1).all())
        else:
            self._options["STEP"] = 32 * tiling.num_warps * tiling.units_per_thread
        kernel = _copy_boxes if is_transposed else _copy_runs
        grid = (len(table.block_of_tile),)
        kernel.warmup(torch.int64, *self._tables, grid=grid, **self._options)  # compiles it
        self._kernel = kernel[grid]

    def keep_for(self, stream: torch.Stream) -> None:
        """Its tables' memory is not used again before ``stream`` is through with them."""
        for table in self._tables:
            table.record_stream(stream)

    def enqueue(self, addresses: Tensor) -> None:
        self._kernel(addresses, *self._tables, **self._options)


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    """``numbers`` on the device, once the current stream is that far.

    Pinned memory of torch's own cache is not used again before the upload has ended.
    """
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _current_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
