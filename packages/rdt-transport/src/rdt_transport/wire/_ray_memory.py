"""The memory of a ray wire: whole storages, pinned once, and views of their regions."""

from collections.abc import Sequence

import torch

from rdt_transport.errors import WireError
from rdt_transport.wire._ray_direct import RayDirect
from rdt_transport.wire._regions import RegisteredRange, RegisteredRanges, storage_range
from rdt_transport.wire.base import Region

__all__ = ["PinnedMemory"]


class PinnedMemory:
    """Registered storages by range; only for the wire's thread."""

    def __init__(self, owner: str, direct: RayDirect) -> None:
        self.ranges = RegisteredRanges(owner)
        self._direct = direct
        self._pinned: dict[RegisteredRange, torch.Tensor] = {}

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        """Pin the storages of these that are not yet; raises `WireError`."""
        for buffer in buffers:
            storage = buffer.untyped_storage()
            kind = storage_range(storage)  # refuses devices; its range may be a whole allocation
            known = RegisteredRange(storage.data_ptr(), storage.nbytes(), kind.device, kind.memory)
            if not self.ranges.add(known):
                continue
            whole = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)
            try:
                self._direct.pin(whole)
            except WireError:
                self.ranges.discard(known)
                raise
            self._pinned[known] = whole

    def view(self, region: Region) -> torch.Tensor:
        """The region as uint8, 1-D; raises `WireError` for one that is not registered."""
        known = self.ranges.holding(region)
        start = region.address - known.address
        return self._pinned[known][start : start + region.num_bytes]

    def held(self) -> list[torch.Tensor]:
        """All of it, to keep it alive."""
        return list(self._pinned.values())

    def release(self) -> None:
        """Unpin and let go of everything."""
        while self._pinned:
            _, whole = self._pinned.popitem()
            self._direct.unpin(whole)
