"""What a loader wrote into the model, as it was seen, and the writes that come of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.errors import OverlapError, UnsupportedTensorError
from rdt_bake.layouts import MAX_PIECES, Layout, join_dims
from rdt_bake.origins import SourceRegion
from rdt_bake.overlaps import settle
from rdt_bake.regions import Region
from rdt_bake.tensors import dtype_name, first_element
from rdt_plan import Fill, Placement, Write, canonical, contiguous_stride

__all__ = ["Landing", "settled_writes"]


@dataclass(slots=True, eq=False)
class Landing:
    """One strided region of a destination's storage, and what was written there.

    Attributes:
        storage: the destination's storage.
        dtype: what the destination was viewed as.
        offset, shape, stride: the region, in elements of ``dtype`` from the storage's start.
        weight: the source's name, or for a fill the weight that was being loaded.
        value: the number written, or None for a copy.
        source_dtype, source_offset, source_stride: a copy's region of its source, dim by dim
            beside ``shape``; stride 0 repeats.
    """

    storage: DestinationStorage
    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    weight: str | None
    value: bool | int | float | None = None
    source_dtype: torch.dtype = torch.uint8
    source_offset: int = 0
    source_stride: Sequence[int] = ()

    @classmethod
    def of_number(
        cls,
        storage: DestinationStorage,
        into: Tensor,
        weight: str | None,
        value: bool | int | float,
    ) -> "Landing":
        """A fill of the view ``into``."""
        return cls(
            storage, into.dtype, first_element(into), into.shape, into.stride(), weight, value
        )

    @classmethod
    def of_source(
        cls, storage: DestinationStorage, into: Tensor, weight: str, value: Tensor
    ) -> "Landing":
        """A copy to the view ``into`` from ``value``, a view of the source, of the same shape."""
        return cls(
            storage,
            into.dtype,
            first_element(into),
            into.shape,
            into.stride(),
            weight,
            None,
            value.dtype,
            first_element(value),
            value.stride(),
        )

    @classmethod
    def of_region(
        cls, storage: DestinationStorage, into: Tensor, region: SourceRegion
    ) -> "Landing":
        """A copy to the part of the view ``into`` that ``region`` lies beside."""
        steps = into.stride()
        return cls(
            storage,
            into.dtype,
            first_element(into) + _dot(region.start, steps),
            region.shape,
            [steps[axis] * step for axis, step in region.steps],
            region.name,
            None,
            region.dtype,
            region.offset,
            region.stride,
        )

    @property
    def is_fill(self) -> bool:
        return self.value is not None

    def joined(self) -> "Landing":
        """The same elements in the source's own order, in as few dims as both sides allow."""
        there = self.source_stride or (0,) * len(self.shape)
        dims = [d for d in zip(self.shape, self.stride, there, strict=True) if d[0] != 1]
        dims.sort(key=lambda d: (d[2] == 0, d[2], d[1]), reverse=True)
        dims = join_dims(dims)
        return replace(
            self,
            shape=tuple(d[0] for d in dims),
            stride=tuple(d[1] for d in dims),
            source_stride=tuple(d[2] for d in dims),
        )

    def region(self, unit_bytes: int) -> Region:
        """Where it lands, in units of ``unit_bytes``."""
        return _region(self.dtype, self.offset, self.shape, self.stride, unit_bytes)

    def within(self, region: Region) -> "list[Landing] | None":
        """The parts that land in ``region``, a subset in elements; None if those are too many."""
        if self.is_fill:
            return [replace(self, offset=region.offset, shape=region.shape, stride=region.stride)]
        try:
            layout = Layout(self.shape, self.stride)
        except ValueError:
            return None
        pieces = layout.trace(region.offset - self.offset, region.shape, region.stride)
        if pieces is None:
            return self._elements_within(region)
        return [
            replace(
                self,
                offset=region.offset + _dot(piece.start, region.stride),
                shape=piece.shape,
                stride=tuple(region.stride[axis] * step for axis, step in piece.steps),
                source_offset=self.source_offset + _dot(piece.index, self.source_stride),
                source_stride=tuple(_dot(move, self.source_stride) for move in piece.moves),
            ).joined()
            for piece in pieces
        ]

    def _elements_within(self, region: Region) -> "list[Landing] | None":
        """One landing an element: neighbours in the destination that the source has not."""
        if not 1 < region.numel <= MAX_PIECES:
            return None
        single = [self.within(Region(at, (), ())) for at in region.positions()]
        return [each for found in single for each in found or ()] if all(single) else None

    def write(self, destination: Destination) -> Write:
        """The write into ``destination``, which the region lies in."""
        at = destination.offset * destination.dtype.itemsize
        if at % self.dtype.itemsize:
            raise UnsupportedTensorError(
                f"viewed as {self.dtype} it does not start at a whole element: it starts at byte "
                f"{at} of its storage",
                weight=self.weight,
                module=destination.module,
                param=destination.param,
            )
        offset = self.offset - at // self.dtype.itemsize
        shape, stride = tuple(self.shape), tuple(self.stride)
        if self.value is not None:
            return Fill(
                destination.module,
                destination.param,
                offset,
                shape,
                stride,
                dtype_name(self.dtype),
                self.value,
            )
        read = [(n, s) for n, s in zip(shape, self.source_stride, strict=True) if s]
        extents = [n for n, _ in read]
        packed = iter(contiguous_stride(extents))
        assert self.weight is not None
        return Placement(
            canonical(
                self.weight,
                dtype_name(self.source_dtype),
                self.source_offset,
                extents,
                [s for _, s in read],
            ),
            destination.module,
            destination.param,
            offset,
            shape,
            stride,
            dtype_name(self.dtype),
            tuple(next(packed) if s else 0 for s in self.source_stride),
        )


def settled_writes(
    storage: DestinationStorage, landings: Sequence[tuple[int, Landing]]
) -> tuple[list[tuple[int, Write]], list[tuple[Destination, tuple[Region, ...], int]]]:
    """The writes into one storage that survive, and what its parameters lack.

    Args:
        storage: where all the landings are.
        landings: non-empty ones in the loaders' order, each with its number in that order.

    Returns:
        Writes, each with the number of the landing it comes of; and per parameter the disjoint
        regions that nothing writes, with the bytes of their unit.

    Raises:
        OverlapError: landings overlap in a way that cannot be made independent of their order.
        UnsupportedTensorError: a landing lies in no single destination.
    """
    destinations = [d for d in storage.destinations if 0 not in d.shape]
    items = {d.dtype.itemsize for d in destinations}
    items |= {landing.dtype.itemsize for _, landing in landings}
    unit = items.pop() if len(items) == 1 else 1
    joined = [landing.joined() for _, landing in landings]
    regions = [landing.region(unit) for landing in joined]
    wanted = [d for d in destinations if d.kind == "parameter"]
    inside = {id(d): _region(d.dtype, d.offset, d.shape, d.stride, unit) for d in destinations}
    owners = [
        _owner(landing, region, destinations, inside)
        for landing, region in zip(joined, regions, strict=True)
    ]
    settled = settle(regions, [x.is_fill for x in joined], [inside[id(d)] for d in wanted])
    for earlier, later in settled.unsettled:
        raise _overlap(joined[earlier], joined[later], owners[earlier])
    writes: list[tuple[int, Write]] = []
    for which, parts in sorted(settled.kept.items()):
        landing, owner, number = joined[which], owners[which], landings[which][0]
        if parts is None:
            writes.append((number, landing.write(owner)))
            continue
        for part in parts:
            kept = landing.within(part) if unit == landing.dtype.itemsize else None
            if kept is None:
                later = next(
                    x
                    for x, r in zip(joined[which + 1 :], regions[which + 1 :], strict=True)
                    if r.offset < regions[which].stop and regions[which].offset < r.stop
                )
                raise _overlap(landing, later, owner)
            writes += [(number, x.write(owner)) for x in kept]
    missing = list(zip(wanted, settled.missing, [unit] * len(wanted), strict=True))
    return writes, missing


def _owner(
    landing: Landing,
    region: Region,
    destinations: Iterable[Destination],
    inside: dict[int, Region],
) -> Destination:
    """The first destination that holds all of ``region``."""
    for destination in destinations:
        whole = inside[id(destination)]
        if region.offset < whole.offset or region.stop > whole.stop:
            continue
        if whole.is_run or not any(settle([whole], [False], [region]).missing):
            return destination
    named = next(iter(destinations))
    raise UnsupportedTensorError(
        "a write leaves the tensor and lies in no other single tensor of the model; write into "
        "each tensor on its own",
        weight=landing.weight,
        module=named.module,
        param=named.param,
    )


def _overlap(earlier: Landing, later: Landing, destination: Destination) -> OverlapError:
    def name(landing: Landing) -> str:
        return f"a fill with {landing.value}" if landing.is_fill else f"weight {landing.weight!r}"

    return OverlapError(
        f"{name(later)} overwrites part of {name(earlier)}, and the part that stays is no small "
        "set of regions; load them into disjoint regions, or each wholly over the other",
        weight=earlier.weight,
        module=destination.module,
        param=destination.param,
    )


def _region(
    dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int], unit_bytes: int
) -> Region:
    scale = dtype.itemsize // unit_bytes
    if scale == 1:
        return Region.normal(offset, shape, stride)
    return Region.normal(offset * scale, (*shape, scale), [*(step * scale for step in stride), 1])


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
