"""Regions of a destination's memory, cut by each other into boxes.

Positions count elements (or bytes) of one storage. A `Grid` is a mixed-radix numbering of the
positions, fine enough that each of a set of regions is a union of few boxes of digits; `cells`
then cuts overlapping boxes into disjoint ones and says which regions each belongs to.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from rdt_bake.layouts import Layout, join_dims

__all__ = ["Box", "Grid", "Region", "cells", "merge"]

Box = tuple[tuple[int, int], ...]
"""Half-open ranges of digits, most significant first."""


class Region(NamedTuple):
    """A strided set of positions; the order of its dims means nothing.

    Attributes:
        offset: its first position.
        shape: extents.
        stride: one a dim.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def normal(cls, offset: int, shape: Sequence[int], stride: Sequence[int]) -> "Region":
        """One spelling for equal sets: larger strides first, mergeable dims merged.

        >>> Region.normal(0, (3, 1, 2), (1, 7, 3))
        Region(offset=0, shape=(6,), stride=(1,))
        """
        return cls(offset, *_normal(tuple(shape), tuple(stride)))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.offset + _reach(self.shape, self.stride)

    def positions(self) -> Iterator[int]:
        """Every position, in the order of the dims."""
        for index in product(*map(range, self.shape)):
            yield self.offset + sum(i * step for i, step in zip(index, self.stride, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether it is one gapless range (of a normal region)."""
        return self.stride in _RUNS


_RUNS = ((), (1,))
"""The strides of a normal region without gaps."""

# The regions of a model have few geometries between them, so each is worked out once.


@lru_cache(maxsize=4096)
def _normal(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims = sorted(zip(shape, stride, strict=True), key=lambda d: d[1], reverse=True)
    joined = join_dims([(extent, step, 0) for extent, step in dims])
    return tuple(d[0] for d in joined), tuple(d[1] for d in joined)


@lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many positions there are from the first to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


class Grid:
    """Digits of positions: ``radix`` holds what one step of each digit is worth, largest first."""

    __slots__ = ("_layout", "_radix")

    def __init__(self, radix: Sequence[int], num_positions: int) -> None:
        extents = [-(-num_positions // radix[0])]
        extents += [above // below for above, below in pairwise(radix)]
        self._radix = tuple(radix)
        self._layout = Layout(extents, radix)

    @classmethod
    def of(cls, regions: Sequence[Region]) -> "Grid | None":
        """The grid of all strides of ``regions``; None when one stride does not divide the next."""
        strides = {1}.union(*(region.stride for region in regions))
        radix = sorted(strides, reverse=True)
        if radix[-1] == 0 or any(above % below for above, below in pairwise(radix)):
            return None
        return cls(radix, max(region.stop for region in regions))

    def boxes(self, region: Region) -> list[Box] | None:
        """Disjoint boxes that together are ``region``; None when they are too many."""
        pieces = self._layout.trace(region.offset, region.shape, region.stride)
        if pieces is None:
            return None
        found = [piece.spans() for piece in pieces]
        whole = sum(prod(hi - lo for lo, hi in box) for box in found)
        return found if whole == region.numel else None

    def region(self, box: Box) -> Region:
        """The positions of ``box``."""
        return Region.normal(
            sum(lo * worth for (lo, _), worth in zip(box, self._radix, strict=True)),
            [hi - lo for lo, hi in box],
            self._radix,
        )


def cells(boxes: Sequence[tuple[int, Box]]) -> Iterator[tuple[Box, frozenset[int]]]:
    """Disjoint boxes that together are the union of ``boxes``, each with whom it belongs to.

    Args:
        boxes: (label, box) pairs; a label may come several times.

    >>> list(cells([(0, ((0, 4),)), (1, ((2, 6),))]))   # doctest: +NORMALIZE_WHITESPACE
    [(((0, 2),), frozenset({0})), (((2, 4),), frozenset({0, 1})), (((4, 6),), frozenset({1}))]
    """
    if not boxes:
        return
    if not boxes[0][1]:
        yield (), frozenset(label for label, _ in boxes)
        return
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for which, (_, box) in enumerate(boxes):
        opens.setdefault(box[0][0], []).append(which)
        closes.setdefault(box[0][1], []).append(which)
    active: dict[int, None] = {}
    for lo, hi in pairwise(sorted(opens.keys() | closes.keys())):
        for which in closes.get(lo, ()):
            del active[which]
        for which in opens.get(lo, ()):
            active[which] = None
        inner = [(boxes[which][0], boxes[which][1][1:]) for which in active]
        for box, labels in cells(inner):
            yield ((lo, hi), *box), labels


def merge(boxes: Sequence[Box]) -> list[Box]:
    """Fewer boxes for the same disjoint ones: neighbours along a digit become one.

    >>> merge([((0, 1), (0, 2)), ((1, 2), (0, 2)), ((0, 2), (2, 5))])
    [((0, 2), (0, 5))]
    """
    merged, before = list(boxes), len(boxes) + 1
    while len(merged) < before:
        before = len(merged)
        for digit in reversed(range(len(merged[0]) if merged else 0)):
            merged = _merge_along(merged, digit)
    return sorted(merged)


def _merge_along(boxes: list[Box], digit: int) -> list[Box]:
    joined: list[Box] = []
    for box in sorted(boxes, key=lambda box: (box[:digit], box[digit + 1 :], box[digit])):
        if joined:
            last = joined[-1]
            same = last[:digit] == box[:digit] and last[digit + 1 :] == box[digit + 1 :]
            if same and last[digit][1] == box[digit][0]:
                joined[-1] = (*box[:digit], (last[digit][0], box[digit][1]), *box[digit + 1 :])
                continue
        joined.append(box)
    return joined
