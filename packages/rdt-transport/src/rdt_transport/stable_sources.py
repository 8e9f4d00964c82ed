"""Stable sources: the tensors of a producer that consumers read without a slot."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from rdt_plan import Manifest, SliceError
from rdt_plan.records import SourceRegion
from rdt_transport.device_memory import VIRTUAL_MEMORY_REMEDY, allocation_of, is_registrable
from rdt_transport.pack import check_held

__all__ = ["MAX_SOURCE_REGIONS", "StableSources"]

_logger = logging.getLogger(__name__)

MAX_SOURCE_REGIONS = 16384
"""Allocations that one producer registers: each adds some hundred bytes to its metadata."""

REPLACED_REMEDY = (
    "workers read the registered memory: change tensors in place, or make the trainer anew after "
    "replacing them"
)


class _Source(NamedTuple):
    """A registered tensor as it was; ``held``: what slotted chunks of it are packed from."""

    region: SourceRegion
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    held: torch.Tensor


class StableSources:
    """What ``rank`` holds in tensors whose memory stays where it is.

    Tensors that cannot be registered (of another device than ``device``, in virtual memory, beyond
    `MAX_SOURCE_REGIONS` allocations) or that have no elements are left out: they go through slots.

    Args:
        manifest: the whole model.
        rank: the producer's.
        tensors: by name, what the rank holds of it: contiguous, of the manifest's dtype.
        device: of the producer's slots.

    Attributes:
        names: of the tensors that direct chunks may read.
        groups: the gather groups of which the rank holds nothing else, and what slotted chunks of
            each are packed from, by name.
        regions: where the tensors lie, in manifest order.
        buffers: what a wire must register.

    Raises:
        ManifestError: a name that is not in the manifest.
        SliceError: a tensor that is not as the manifest says, or not contiguous.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | str,
    ) -> None:
        self._sources: dict[str, _Source] = {}
        self._manifest = manifest
        self._rank = rank
        where = torch.device(device)
        buffers: dict[int, torch.Tensor] = {}
        allocations: set[tuple[int, int]] = set()
        left_out: dict[str, list[str]] = {}
        for name in tensors:
            manifest.param(name)
        for index, param in enumerate(manifest.params):
            tensor = tensors.get(param.name)
            if tensor is None or not tensor.numel():
                continue
            held = check_held(param, rank, tensor)
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                raise SliceError(
                    f"{param.name}: a stable tensor must be contiguous, without a conjugate or "
                    f"negative bit, found strides {tensor.stride()} of shape {list(tensor.shape)}; "
                    "leave it out of the stable tensors"
                )
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in buffers:
                allocation = allocation_of(storage)
                why = _why_not(tensor, where, len(allocations) - (allocation in allocations))
                if why is not None:
                    left_out.setdefault(why, []).append(param.name)
                    continue
                buffers[storage.data_ptr()] = tensor
                allocations.add(allocation)
            address = tensor.data_ptr()
            self._sources[param.name] = _Source(
                SourceRegion(index, address, tensor.device.index or 0),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                held,
            )
        for why, names in left_out.items():
            _logger.warning(
                "producer %d: %s and %d more go through slots: %s",
                rank,
                names[0],
                len(names) - 1,
                why,
            )
        self.buffers: Sequence[torch.Tensor] = tuple(buffers.values())
        self.regions = tuple(source.region for source in self._sources.values())
        self.names = frozenset(self._sources)
        others = {
            manifest.group_of(param.name)
            for param in manifest.params
            if param.name not in self.names and param.held_by(rank) is not None
        }
        by_group: dict[int, dict[str, torch.Tensor]] = {}
        for name, source in self._sources.items():
            by_group.setdefault(manifest.group_of(name), {})[name] = source.held
        self.groups = {group: held for group, held in by_group.items() if group not in others}
        self._registered = self._last_checked = tensors

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises `SliceError` unless ``tensors`` are those that were registered, by name.

        The very mapping of the last time, or that this was made with, is not looked at again.
        """
        if tensors is self._last_checked or tensors is self._registered:
            return
        self._last_checked = self._registered
        for name in self._sources:
            if name not in tensors:
                raise SliceError(
                    f"{name}: producer {self._rank} registered it, and it is no stable tensor any "
                    f"more; {REPLACED_REMEDY}"
                )
            self.checked(name, tensors[name])
        self._last_checked = tensors

    def checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What slotted chunks of ``name`` are packed from: see `check_held`.

        Raises `SliceError` for a tensor that is not as the manifest says, and for a stable one that
        is not the memory that was registered.
        """
        source = self._sources.get(name)
        if source is None:
            return check_held(self._manifest.param(name), self._rank, tensor)
        if (
            tensor.data_ptr() != source.region.address
            or tensor.shape != source.shape
            or tensor.stride() != source.stride
            or tensor.dtype != source.dtype
        ):
            raise SliceError(
                f"{name}: producer {self._rank} registered {source.dtype}{list(source.shape)} with "
                f"strides {source.stride} at {source.region.address:#x}, and published "
                f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} at "
                f"{tensor.data_ptr():#x}; {REPLACED_REMEDY}"
            )
        return source.held


def _why_not(tensor: torch.Tensor, where: torch.device, num_others: int) -> str | None:
    found = tensor.device
    if found.type != where.type or (where.index is not None and found.index != where.index):
        return f"they lie on {found}, and this producer serves memory of {where}"
    if num_others >= MAX_SOURCE_REGIONS:
        return f"at most {MAX_SOURCE_REGIONS} allocations are registered"
    if not is_registrable(tensor):
        return f"they lie in virtual memory, which cannot be registered; {VIRTUAL_MEMORY_REMEDY}"
    return None
