"""The pack layout: the byte contract of a chunk.

Producer and consumer both call `pack_layout`, so neither trusts an offset of the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdt_plan.slices import Slice

__all__ = ["ALIGNMENT", "PackLayout", "align", "pack_layout"]

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
    offsets = []
    end = 0
    for slice_ in slices:
        num_bytes = slice_.num_bytes
        if num_bytes == 0:
            offsets.append(0)
            continue
        start = align(end)
        offsets.append(start)
        end = start + num_bytes
    return PackLayout(tuple(offsets), end)
