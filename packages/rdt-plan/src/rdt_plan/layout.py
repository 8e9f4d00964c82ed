"""The pack layout: the byte contract of a chunk.

Producer and consumer both call `pack_layout`, so neither trusts an offset of the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdt_plan.slices import Slice

__all__ = ["ALIGNMENT", "PackLayout", "align", "pack_layout", "pack_layouts"]

ALIGNMENT = 16
"""Every slice starts at a multiple of this many bytes: the widest element and vector load."""


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where each slice of a chunk starts.

    Attributes:
        offsets: in bytes, one a slice, multiples of `ALIGNMENT`; 0 for an empty slice.
        num_bytes: end of the last slice; no padding follows it.
    """

    offsets: tuple[int, ...]
    num_bytes: int


def align(num_bytes: int) -> int:
    """``num_bytes`` rounded up to `ALIGNMENT`.

    >>> align(0), align(1), align(16)
    (0, 16, 16)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack_layout(slices: "Iterable[Slice]") -> PackLayout:
    """Lay ``slices`` out one after another; empty slices take no bytes.

    >>> from rdt_plan import Slice
    >>> pack_layout([Slice("a", "int8", 0, (3,), (1,)), Slice("b", "int8", 0, (5,), (1,))])
    PackLayout(offsets=(0, 16), num_bytes=21)
    """
    return pack_layouts([slice_.num_bytes for slice_ in slices])[0]


def pack_layouts(sizes: Iterable[int], max_bytes: int | None = None) -> list[PackLayout]:
    """`pack_layout` of slices of so many bytes, in as many parts as ``max_bytes`` asks for.

    A part is closed when its next slice would take it past ``max_bytes``; a slice that is larger
    is a part of its own. None: there is no limit.

    >>> [layout.offsets for layout in pack_layouts([20, 30, 8], max_bytes=64)]
    [(0, 32), (0,)]
    """
    layouts = []
    offsets: list[int] = []
    start = end = 0
    for num_bytes in sizes:
        if max_bytes is not None and start + num_bytes > max_bytes and offsets:
            layouts.append(PackLayout(tuple(offsets), end))
            offsets = []
            start = 0
        if num_bytes == 0:
            offsets.append(0)
            continue
        offsets.append(start)
        end = start + num_bytes
        start = -(-end // ALIGNMENT) * ALIGNMENT
    layouts.append(PackLayout(tuple(offsets), end))
    return layouts
