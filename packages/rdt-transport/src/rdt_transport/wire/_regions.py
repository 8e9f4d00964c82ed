"""Which byte ranges are registered, ours or a peer's, and which of them holds a region."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rdt_transport.agent import MemoryKind, Span
from rdt_transport.device_memory import allocation_of
from rdt_transport.errors import WireError
from rdt_transport.wire.base import Region, RegionPair

__all__ = ["RegisteredRange", "RegisteredRanges", "check_pairs", "spans_of", "storage_range"]

_MEMORY_KINDS: dict[str, MemoryKind] = {"cpu": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True, slots=True)
class RegisteredRange:
    """Absolute address, length in bytes, device ordinal, and kind of one range."""

    address: int
    num_bytes: int
    device: int
    memory: MemoryKind

    @property
    def end(self) -> int:
        return self.address + self.num_bytes


def storage_range(storage: torch.UntypedStorage) -> RegisteredRange:
    """What is registered for one storage: all of the allocation that it lies in.

    Neighbours that an allocator cut from one allocation then share a range, and their regions can
    be read as one. Raises `WireError` for a device no wire can read.
    """
    device = storage.device
    memory = _MEMORY_KINDS.get(device.type)
    if memory is None:
        raise WireError(f"memory of device {device} cannot be registered; expected cpu or cuda")
    return RegisteredRange(*allocation_of(storage), device.index or 0, memory)


def check_pairs(peer_name: str, pairs: Sequence[RegionPair]) -> None:
    """Raises `WireError` unless there are pairs, each of two regions of the same length."""
    if not pairs:
        raise WireError(f"a read from {peer_name} needs at least one pair of regions, found none")
    for local, remote in pairs:
        if local.num_bytes != remote.num_bytes:
            raise WireError(
                f"a read from {peer_name} needs equal lengths, found {local.num_bytes} bytes here "
                f"and {remote.num_bytes} there"
            )


def spans_of(regions: Sequence[Region]) -> list[Span]:
    """The regions as an agent takes them."""
    return [(region.address, region.num_bytes, region.device) for region in regions]


class RegisteredRanges:
    """Disjoint registered ranges of one wire, found by address."""

    def __init__(self, owner: str, ranges: Sequence[RegisteredRange] = ()) -> None:
        self._owner = owner
        self._ranges = sorted(ranges, key=lambda known: known.address)
        self._starts = [known.address for known in self._ranges]

    def __iter__(self) -> Iterator[RegisteredRange]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, new: RegisteredRange) -> bool:
        """True if ``new`` was added, False if it is empty or inside a known range.

        Raises:
            WireError: ``new`` overlaps a known range without lying inside it.
        """
        at = bisect_right(self._starts, new.address)
        if new.num_bytes == 0 or (at and new.end <= self._ranges[at - 1].end):
            return False
        for known in self._ranges[max(at - 1, 0) : at + 1]:
            if new.address < known.end and known.address < new.end:
                raise WireError(
                    f"{self._owner}: memory [{new.address:#x}, {new.end:#x}) overlaps the "
                    f"registered [{known.address:#x}, {known.end:#x}); register one storage that "
                    "holds both, and never resize a registered one"
                )
        self._starts.insert(at, new.address)
        self._ranges.insert(at, new)
        return True

    def discard(self, known: RegisteredRange) -> None:
        """Forget a range that was added."""
        at = self._ranges.index(known)
        del self._ranges[at], self._starts[at]

    def holding(self, region: Region) -> RegisteredRange:
        """The range that holds all of ``region``.

        Raises:
            WireError: ``region`` is empty or not inside one registered range.
        """
        if region.num_bytes <= 0:
            raise WireError(f"{self._owner}: a region of {region.num_bytes} bytes cannot be read")
        end = region.address + region.num_bytes
        at = bisect_right(self._starts, region.address)
        if at:
            known = self._ranges[at - 1]
            if end <= known.end and region.device == known.device:
                return known
        raise WireError(
            f"{self._owner}: region [{region.address:#x}, {end:#x}) of device {region.device} lies "
            f"outside its {len(self)} registered ranges; register the buffer and, if it is a "
            "peer's, connect again with that peer's newer address"
        )

    def memory_of(self, regions: Sequence[Region]) -> MemoryKind:
        """The one kind of memory that these regions lie in; raises `WireError` for two."""
        kinds = {self.holding(region).memory for region in regions}
        if len(kinds) > 1:
            raise WireError(
                f"{self._owner}: the regions of one read lie in {' and '.join(sorted(kinds))}; "
                "read those of each kind by a handle of their own"
            )
        return kinds.pop()
