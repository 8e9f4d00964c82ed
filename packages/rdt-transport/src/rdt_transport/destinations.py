"""Destinations: the live tensors of the model that direct reads land in."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from rdt_plan import Placement, SyncPlan
from rdt_plan.dtypes import ITEM_BYTES
from rdt_transport.device_memory import VIRTUAL_MEMORY_REMEDY, is_registrable
from rdt_transport.errors import WireError

__all__ = ["Destination", "Destinations"]

Destination = Callable[[str, str], torch.Tensor]
"""The live tensor of (module, param)."""


class _Layout(NamedTuple):
    """Where tensors lie and how, a list of each; made and compared without a step for each one."""

    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "_Layout":
        with torch._C.DisableTorchFunctionSubclass():  # of subclasses, the plain tensor counts
            return cls(
                list(map(torch.Tensor.data_ptr, tensors)),
                list(map(torch.Tensor.size, tensors)),
                list(map(torch.Tensor.stride, tensors)),
                [tensor.dtype for tensor in tensors],
            )

    def words(self, index: int) -> str:
        """One tensor's, for a message."""
        dtype, shape = self.dtypes[index], list(self.shapes[index])
        return f"{dtype}{shape}, strides {self.strides[index]}, at {self.addresses[index]:#x}"


class Destinations:
    """The tensors that the direct chunks of a plan need, found once, and checked each epoch.

    Args:
        plan: whose direct chunks name them.
        find: the live tensor of (module, param), in each epoch anew.

    Attributes:
        buffers: what a wire must register; empty without direct chunks.

    Raises:
        WireError: the plan has direct chunks and nobody finds their destinations, one lies in
            memory that cannot be registered, or two reads would land on the same bytes.
    """

    def __init__(self, plan: SyncPlan, find: Destination | None) -> None:
        places = [place for chunk in plan.chunks if chunk.is_direct for place in chunk.placements]
        names = dict.fromkeys((place.module, place.param) for place in places)
        if names and find is None:
            raise WireError(
                f"the plan of {plan.consumer} reads {len(names)} tensors directly; give the "
                "consumer its destinations, or plan without a direct rule"
            )
        self._find = find
        self._names = tuple(names)
        buffers: dict[int, torch.Tensor] = {}
        tensors = self._tensors()
        for (module, param), tensor in zip(names, tensors, strict=True):
            if not is_registrable(tensor):
                raise WireError(
                    f"{module}.{param} lies in virtual memory, which cannot be registered; "
                    f"{VIRTUAL_MEMORY_REMEDY}, or leave it out of the direct rule"
                )
            buffers.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        self.buffers: Sequence[torch.Tensor] = tuple(buffers.values())
        self._registered = _Layout.of(tensors)
        self._check_apart(places)

    def _check_apart(self, places: Iterable[Placement]) -> None:
        """Direct reads end in any order, so no two may land on the same bytes."""
        address = dict(zip(self._names, self._registered.addresses, strict=True))
        landings = sorted(
            (
                address[place.module, place.param] + place.offset * ITEM_BYTES[place.dtype],
                place.slice.num_bytes,
                f"{place.slice.name} into {place.module}.{place.param}",
            )
            for place in places
        )
        for (start, num_bytes, one), (after, _, other) in pairwise(landings):
            if after < start + num_bytes:
                raise WireError(
                    f"direct reads of {one} and of {other} land on the same bytes, and either may "
                    "be the last; leave these tensors out of the direct rule"
                )

    def find(self, module: str, param: str) -> torch.Tensor:
        """The live tensor of that name."""
        assert self._find is not None
        return self._find(module, param)

    def _tensors(self) -> list[torch.Tensor]:
        return [self.find(*name) for name in self._names]

    def check(self) -> None:
        """Raise `WireError` by name when a tensor is not the memory that was registered."""
        now, before = _Layout.of(self._tensors()), self._registered
        if now == before:
            return
        for index, (module, param) in enumerate(self._names):
            if any(new[index] != old[index] for new, old in zip(now, before, strict=True)):
                raise WireError(
                    f"{module}.{param} was registered as {before.words(index)}, and is "
                    f"{now.words(index)} now; reads would land in the old memory: initialise the "
                    "weight transfer again"
                )
