"""Copies as blocks of bytes: what a strided copy is once its dtype no longer matters.

Pure: numbers only, no tensor. A block is moved in units of `Block.width` bytes, the widest that its
addresses, strides and lengths all divide by.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from rdt_plan import SliceError

__all__ = ["WIDEST", "Axis", "Block", "Copy", "blocks_of", "extent_bytes"]

WIDEST = 16
"""Bytes of the widest unit: what one thread of a GPU loads at once."""

_WORTH_SPLITTING = 16 * WIDEST
"""Runs shorter than this are moved in narrow units rather than as a head, a body and a tail."""


class Copy(NamedTuple):
    """One strided region copied from base tensor ``source`` to base tensor ``target``, bit by bit.

    Attributes:
        source: index of the base that is read.
        target: index of the base that is written.
        source_offset: first byte read, from the base's first element.
        target_offset: first byte written, from the base's first element.
        shape: extents, the same on both sides; ``()`` is one element.
        source_strides: one a dim, in elements.
        target_strides: one a dim, in elements; no element is written twice.
        item_bytes: bytes of one element: 1, 2, 4, 8 or 16.
    """

    source: int
    target: int
    source_offset: int
    target_offset: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int


class Axis(NamedTuple):
    """One dim of a block: its extent, and bytes from one to the next on either side."""

    extent: int
    source: int
    target: int


class Block(NamedTuple):
    """Runs of contiguous bytes, repeated along axes.

    Attributes:
        source, target: indices of the bases.
        source_offset, target_offset: first byte in each.
        axes: of more than one run each, that with the largest step over the target first.
        run_bytes: length of each run; a multiple of ``width``.
        width: a power of two up to `WIDEST`; divides every address, step and length.
    """

    source: int
    target: int
    source_offset: int
    target_offset: int
    axes: tuple[Axis, ...]
    run_bytes: int
    width: int


def extent_bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Bytes from a region's first one to the end of its last one; 0 when it is empty.

    >>> extent_bytes((2, 3), (10, 1), 4)
    52
    """
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) * item_bytes


def blocks_of(copy: Copy, source_address: int, target_address: int) -> list[Block]:
    """The blocks that together are ``copy``; the addresses count modulo `WIDEST` only.

    Raises:
        SliceError: the copy contradicts itself.

    >>> blocks_of(Copy(0, 1, 0, 32, (4, 8), (16, 1), (8, 1), 2), 0, 0)
    [Block(source=0, target=1, source_offset=0, target_offset=32, \
axes=(Axis(extent=4, source=32, target=16),), run_bytes=16, width=16)]
    """
    _check(copy)
    if 0 in copy.shape:
        return []
    *axes, run = _merged(copy)
    whole = Block(*copy[:4], tuple(axes), run.extent, 1)
    source_address += copy.source_offset
    target_address += copy.target_offset
    # On both sides equally far from an aligned address: only the ends of each run are narrow.
    splits = (
        run.extent >= _WORTH_SPLITTING
        and (source_address - target_address) % WIDEST == 0
        and all(step % WIDEST == 0 for axis in axes for step in axis[1:])
    )
    head = -source_address % WIDEST if splits else 0
    tail = (run.extent - head) % WIDEST if splits else 0
    blocks = []
    start = 0
    for num_bytes in (head, run.extent - head - tail, tail):
        if num_bytes:
            steps = (step for axis in axes for step in axis[1:])
            width = _width(source_address + start, target_address + start, num_bytes, *steps)
            blocks.append(
                whole._replace(
                    source_offset=copy.source_offset + start,
                    target_offset=copy.target_offset + start,
                    run_bytes=num_bytes,
                    width=width,
                )
            )
        start += num_bytes
    return blocks


def _check(copy: Copy) -> None:
    if not len(copy.shape) == len(copy.source_strides) == len(copy.target_strides):
        raise SliceError(f"expected one stride a dim on both sides, found {copy}")
    if copy.item_bytes not in (1, 2, 4, 8, 16):
        raise SliceError(f"expected elements of 1, 2, 4, 8 or 16 bytes, found {copy}")
    if min((*copy[:4], *copy.shape, *copy.source_strides, *copy.target_strides)) < 0:
        raise SliceError(f"expected no negative value, found {copy}")
    repeats = (n > 1 and not step for n, step in zip(copy.shape, copy.target_strides, strict=True))
    if prod(copy.shape) and any(repeats):
        raise SliceError(f"expected every byte written once, found {copy}")


def _merged(copy: Copy) -> list[Axis]:
    """The fewest axes that visit the copy's bytes, in the target's order; the last is a run."""
    item = copy.item_bytes
    axes = sorted(
        (
            Axis(extent, source * item, target * item)
            for extent, source, target in zip(
                copy.shape, copy.source_strides, copy.target_strides, strict=True
            )
            if extent > 1
        ),
        key=lambda axis: (axis.target, axis.source),
    )
    merged = [Axis(item, 1, 1)]  # the bytes of an element; built from the innermost outwards
    for outer in axes:
        inner = merged[-1]
        if (outer.source, outer.target) == (
            inner.source * inner.extent,
            inner.target * inner.extent,
        ):
            merged[-1] = inner._replace(extent=inner.extent * outer.extent)
        else:
            merged.append(outer)
    return merged[::-1]


def _width(*multiples: int) -> int:
    """The largest power of two up to `WIDEST` that divides all of them."""
    bits = WIDEST
    for value in multiples:
        bits |= value
    return bits & -bits
