"""What a loader wrote into the model, as it was seen, and the writes that come of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.errors import OverlapError, UnsupportedTensorError
from rdt_bake.layouts import MAX_PIECES, Layout, Piece, join_dims
from rdt_bake.overlaps import settle
from rdt_bake.regions import Region
from rdt_bake.source_regions import SourceRegion
from rdt_bake.tensors import dtype_name, first_element
from rdt_plan import Fill, Placement, Slice, Write, canonical, contiguous_stride

__all__ = ["Ints", "Landing", "joined", "region_of", "settled_writes"]

Ints = tuple[int, ...]

_BYTE = torch.uint8


@dataclass(slots=True, eq=False)
class Landing:
    """One strided region of a destination's storage, and what was written there.

    The dims are in the source's own order, as few as both sides allow.

    Attributes:
        storage: the destination's storage.
        dtype: what the destination was viewed as.
        offset, shape, stride: the region, in elements of ``dtype`` from the storage's start.
        weight: the source's name, or for a fill the weight that was being loaded.
        value: the number written, or None for a copy.
        source_dtype, source_offset, source_stride: a copy's region of its source, dim by dim
            beside ``shape``; stride 0 repeats.
        after: how many computations the loader had done before.
    """

    storage: DestinationStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    weight: str | None
    value: bool | int | float | None
    source_dtype: torch.dtype
    source_offset: int
    source_stride: tuple[int, ...]
    after: int = 0

    @classmethod
    def of_number(
        cls,
        storage: DestinationStorage,
        into: Tensor,
        weight: str | None,
        value: bool | int | float,
    ) -> "Landing":
        """A fill of the view ``into``."""
        dims = joined(into.shape, into.stride(), (0,) * into.ndim)
        return cls(storage, into.dtype, first_element(into), *dims[:2], weight, value, _BYTE, 0, ())

    @classmethod
    def of_source(
        cls, storage: DestinationStorage, into: Tensor, weight: str, value: Tensor
    ) -> "Landing":
        """A copy to the view ``into`` from ``value``, a view of the source, of the same shape."""
        shape, stride, read = joined(into.shape, into.stride(), value.stride())
        return cls(
            storage,
            into.dtype,
            first_element(into),
            shape,
            stride,
            weight,
            None,
            value.dtype,
            first_element(value),
            read,
        )

    @classmethod
    def of_region(
        cls, storage: DestinationStorage, into: Tensor, region: SourceRegion
    ) -> "Landing":
        """A copy to the part of the view ``into`` that ``region`` lies beside."""
        steps = into.stride()
        own = tuple(steps[axis] * step for axis, step in region.steps)
        shape, stride, read = joined(region.shape, own, region.stride)
        return cls(
            storage,
            into.dtype,
            first_element(into) + _dot(region.start, steps),
            shape,
            stride,
            region.name,
            None,
            region.dtype,
            region.offset,
            read,
        )

    @property
    def is_fill(self) -> bool:
        return self.value is not None

    def region(self, unit_bytes: int) -> Region:
        """Where it lands, in units of ``unit_bytes``."""
        return region_of(self.dtype, self.offset, self.shape, self.stride, unit_bytes)

    def within(self, region: Region) -> "list[Landing] | None":
        """The parts that land in ``region``, a subset in elements; None if those are too many."""
        if self.is_fill:
            shape, stride, _ = joined(region.shape, region.stride, (0,) * len(region.shape))
            return [replace(self, offset=region.offset, shape=shape, stride=stride)]
        try:
            layout = Layout(self.shape, self.stride)
        except ValueError:
            return None
        pieces = layout.trace(region.offset - self.offset, region.shape, region.stride)
        if pieces is None:
            return self._elements_within(region)
        return [self._part(region, piece) for piece in pieces]

    def _part(self, region: Region, piece: Piece) -> "Landing":
        """What lands in ``piece``, a part of ``region``."""
        own = tuple(region.stride[axis] * step for axis, step in piece.steps)
        there = tuple(_dot(move, self.source_stride) for move in piece.moves)
        shape, stride, read = joined(piece.shape, own, there)
        return replace(
            self,
            offset=region.offset + _dot(piece.start, region.stride),
            shape=shape,
            stride=stride,
            source_offset=self.source_offset + _dot(piece.index, self.source_stride),
            source_stride=read,
        )

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
        module, param = destination.places[0]
        dtype = dtype_name(self.dtype)
        if self.value is not None:
            return Fill(module, param, offset, self.shape, self.stride, dtype, self.value)
        assert self.weight is not None
        shape, stride, packed = _read(self.shape, self.source_stride)
        read = Slice(self.weight, dtype_name(self.source_dtype), self.source_offset, shape, stride)
        return Placement(read, module, param, offset, self.shape, self.stride, dtype, packed)


# The weights of a model have few geometries between them, so each is worked out once.


@lru_cache(maxsize=4096)
def joined(shape: Ints, stride: Ints, source_stride: Ints) -> tuple[Ints, Ints, Ints]:
    """The same elements in the source's own order, in as few dims as both sides allow."""
    dims = [d for d in zip(shape, stride, source_stride, strict=True) if d[0] != 1]
    dims.sort(key=lambda d: (d[2] == 0, d[2], d[1]), reverse=True)
    joined = join_dims(dims)
    return tuple(d[0] for d in joined), tuple(d[1] for d in joined), tuple(d[2] for d in joined)


@lru_cache(maxsize=4096)
def _read(shape: Ints, source_stride: Ints) -> tuple[Ints, Ints, Ints]:
    """Shape and stride of the canonical slice that a copy reads, and its strides once packed."""
    read = [(extent, step) for extent, step in zip(shape, source_stride, strict=True) if step]
    extents = [extent for extent, _ in read]
    own = canonical("", "uint8", 0, extents, [step for _, step in read])
    packed = iter(contiguous_stride(extents))
    return own.shape, own.stride, tuple(next(packed) if step else 0 for step in source_stride)


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
    own = [landing for _, landing in landings]
    regions = [region_of(x.dtype, x.offset, x.shape, x.stride, unit) for x in own]
    wanted = [d for d in destinations if d.kind == "parameter"]
    inside = {id(d): region_of(d.dtype, d.offset, d.shape, d.stride, unit) for d in destinations}
    owners = [
        _owner(landing, region, destinations, inside)
        for landing, region in zip(own, regions, strict=True)
    ]
    settled = settle(regions, [x.is_fill for x in own], [inside[id(d)] for d in wanted])
    for earlier, later in settled.unsettled:
        raise _overlap(own[earlier], own[later], owners[earlier])
    writes: list[tuple[int, Write]] = []
    for which, parts in sorted(settled.kept.items()):
        landing, owner, number = own[which], owners[which], landings[which][0]
        if parts is None:
            writes.append((number, landing.write(owner)))
            continue
        for part in parts:
            kept = landing.within(part) if unit == landing.dtype.itemsize else None
            if kept is None:
                later = next(
                    x
                    for x, r in zip(own[which + 1 :], regions[which + 1 :], strict=True)
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
    stop = region.stop
    for destination in destinations:
        whole = inside[id(destination)]
        if region.offset < whole.offset or stop > whole.stop:
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


def region_of(
    dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int], unit_bytes: int
) -> Region:
    """A view of a storage as positions of ``unit_bytes``, which divide an element of ``dtype``."""
    scale = dtype.itemsize // unit_bytes
    if scale == 1:
        return Region.normal(offset, shape, stride)
    return Region.normal(offset * scale, (*shape, scale), [*(step * scale for step in stride), 1])


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
