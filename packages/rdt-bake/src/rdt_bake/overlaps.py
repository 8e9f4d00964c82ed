"""Settling overlapping writes to one storage, so that their order no longer matters.

The loaders' order is the truth: the last write to an element wins. Writes that survive nowhere are
dropped, those that survive in part are cut down to that part, and what nobody wrote is reported.
Fills run before all placements, so a fill may stay whole where placements overwrite it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rdt_bake.layouts import MAX_PIECES
from rdt_bake.regions import Grid, Region, cells, merge

__all__ = ["MAX_ELEMENTS", "Settlement", "missing_regions", "runs", "settle"]

MAX_ELEMENTS = 1 << 24
"""Largest storage, in elements, whose writes are settled one element at a time."""

_DESTINATION = -1  # the label of regions that must be written, beside the writes' own indices


@dataclass(frozen=True, slots=True)
class Settlement:
    """What is left of the writes to one storage.

    Attributes:
        kept: surviving writes by index: None for whole, else the disjoint regions it keeps.
        unsettled: index pairs (earlier, later) whose overlap could not be resolved.
        missing: per destination, disjoint regions that no write covers.
    """

    kept: dict[int, tuple[Region, ...] | None]
    unsettled: tuple[tuple[int, int], ...]
    missing: tuple[tuple[Region, ...], ...]


def settle(
    writes: Sequence[Region], fills: Sequence[bool], destinations: Sequence[Region]
) -> Settlement:
    """Settles ``writes``, in the loaders' order, against each other and the ``destinations``.

    Args:
        writes: normal, non-empty regions of one storage.
        fills: whether each write is a fill.
        destinations: normal, non-empty regions that should be written wholly.
    """
    gaps = _settle_runs(writes, destinations)
    if gaps is not None:
        return Settlement(dict.fromkeys(range(len(writes))), (), gaps)
    last = {region: which for which, region in enumerate(writes)}
    live = [which for which, region in enumerate(writes) if last[region] == which]
    if len(live) < len(writes):
        gaps = _settle_runs([writes[which] for which in live], destinations)
        if gaps is not None:
            return Settlement(dict.fromkeys(live), (), gaps)
    grid = Grid.of([*(writes[which] for which in live), *destinations])
    if grid is not None:
        settled = _settle_boxes(grid, writes, live, fills, destinations)
        if settled is not None:
            return settled
    return _settle_elements(writes, live, fills, destinations)


def missing_regions(
    writes: Sequence[Region], wanted: Sequence[Region]
) -> tuple[tuple[Region, ...], ...]:
    """What of each of the ``wanted`` regions, normal and non-empty, no write covers."""
    if not writes or not wanted:
        return tuple((region,) for region in wanted)
    settled = settle(writes, [False] * len(writes), wanted)
    if any(region.stop > MAX_ELEMENTS for region in wanted) and settled.unsettled:
        return tuple((region,) for region in wanted)  # too large to say
    return settled.missing


def _settle_runs(
    writes: Sequence[Region], destinations: Sequence[Region]
) -> tuple[tuple[Region, ...], ...] | None:
    """What is missing when everything is a gapless range and no two writes overlap, else None."""
    if len(writes) == 1 and all(region == writes[0] for region in destinations):
        return ((),) * len(destinations)
    if not all(region.is_run for region in (*writes, *destinations)):
        return None
    ranges = sorted((region.offset, region.stop) for region in writes)
    if any(stop > start for (_, stop), (start, _) in pairwise(ranges)):
        return None
    missing = []
    for region in destinations:
        gaps, at = [], region.offset
        for start, stop in (*ranges, (region.stop, region.stop)):
            if start > at:
                end = min(start, region.stop)
                if end > at:
                    gaps.append(Region.normal(at, (end - at,), (1,)))
            at = max(at, stop)
        missing.append(tuple(gaps))
    return tuple(missing)


def _settle_boxes(
    grid: Grid,
    writes: Sequence[Region],
    live: list[int],
    fills: Sequence[bool],
    destinations: Sequence[Region],
) -> Settlement | None:
    labelled = [(which, writes[which]) for which in live]
    labelled += [(_DESTINATION - at, region) for at, region in enumerate(destinations)]
    boxes = []
    for label, region in labelled:
        found = grid.boxes(region)
        if found is None:
            return None
        boxes += [(label, box) for box in found]

    final: dict[int, list] = {which: [] for which in live}
    lost: dict[int, set[int]] = {which: set() for which in live}
    gaps: list[list] = [[] for _ in destinations]
    for box, labels in cells(boxes):
        winner = max(labels)
        if winner < 0:
            for label in labels:
                gaps[_DESTINATION - label].append(box)
            continue
        final[winner].append(box)
        for label in labels:
            if 0 <= label < winner:
                lost[label].add(winner)

    kept: dict[int, tuple[Region, ...] | None] = {}
    for which in live:
        if not final[which]:
            continue
        if not lost[which] or (fills[which] and not any(fills[by] for by in lost[which])):
            kept[which] = None
        else:
            kept[which] = tuple(grid.region(box) for box in merge(final[which]))
    missing = tuple(tuple(grid.region(box) for box in merge(found)) for found in gaps)
    return Settlement(kept, (), missing)


def _settle_elements(
    writes: Sequence[Region],
    live: list[int],
    fills: Sequence[bool],
    destinations: Sequence[Region],
) -> Settlement:
    """Settles with one number an element, for strides that fit no grid."""
    size = max(region.stop for region in (*writes, *destinations))
    if size > MAX_ELEMENTS:
        return Settlement(dict.fromkeys(live), ((live[0], live[-1]),), ((),) * len(destinations))
    owner = torch.full((size,), -1, dtype=torch.int32)
    for which in live:
        _elements(owner, writes[which]).fill_(which)
    kept: dict[int, tuple[Region, ...] | None] = {}
    unsettled = []
    for which in live:
        owners = _elements(owner, writes[which])
        found = owners.unique().tolist()
        if which not in found:
            continue
        kept[which] = None
        later = [by for by in found if by != which]
        if later and not (fills[which] and not any(fills[by] for by in later)):
            parts = kept[which] = runs(owner == which)
            if len(parts) > MAX_PIECES:
                unsettled.append((which, later[0]))
    missing = []
    for region in destinations:
        own = torch.zeros(size, dtype=torch.bool)
        _elements(own, region).fill_(True)
        missing.append(runs(own & (owner < 0)))
    return Settlement(kept, tuple(unsettled), tuple(missing))


def runs(chosen: torch.Tensor) -> tuple[Region, ...]:
    """The positions where a flat mask is true, as gapless ranges."""
    edges = torch.diff(chosen.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return tuple(
        Region.normal(lo, (hi - lo,), (1,))
        for lo, hi in zip(starts.tolist(), stops.tolist(), strict=True)
    )


def _elements(flat: torch.Tensor, region: Region) -> torch.Tensor:
    return flat.as_strided(region.shape, region.stride, region.offset)
