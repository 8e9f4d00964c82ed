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


class _Registered(NamedTuple):
    """A destination as it was when it was registered."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


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
        self._registered: dict[tuple[str, str], _Registered] = {}
        buffers: dict[int, torch.Tensor] = {}
        for module, param in names:
            tensor = self.find(module, param)
            if not is_registrable(tensor):
                raise WireError(
                    f"{module}.{param} lies in virtual memory, which cannot be registered; "
                    f"{VIRTUAL_MEMORY_REMEDY}, or leave it out of the direct rule"
                )
            self._registered[module, param] = _as_it_is(tensor)
            buffers.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        self.buffers: Sequence[torch.Tensor] = tuple(buffers.values())
        self._check_apart(places)

    def _check_apart(self, places: Iterable[Placement]) -> None:
        """Direct reads end in any order, so no two may land on the same bytes."""
        landings = sorted(
            (
                self._registered[place.module, place.param].address
                + place.offset * ITEM_BYTES[place.dtype],
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

    def check(self) -> None:
        """Raise `WireError` by name when a tensor is not the memory that was registered."""
        for (module, param), before in self._registered.items():
            now = _as_it_is(self.find(module, param))
            if now != before:
                raise WireError(
                    f"{module}.{param} was registered as {before}, and is {now} now; reads would "
                    "land in the old memory: initialise the weight transfer again"
                )


def _as_it_is(tensor: torch.Tensor) -> _Registered:
    return _Registered(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
