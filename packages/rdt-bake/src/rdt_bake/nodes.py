"""What a loader computed, in order: one node an operation that made or changed a value.

Nothing is evaluated. A node holds what the operation was called with, each tensor as a `View`: what
its storage stood for at that moment, and how the tensor saw it. So a view costs no node, and a node
is but a note that programs are cut from when all is known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rdt_bake.origins import Brought, Computed, View
from rdt_plan.slices import contiguous_stride

__all__ = ["MAX_BROUGHT_BYTES", "Node", "brought", "known_values", "mapped", "views_in"]

MAX_BROUGHT_BYTES = 1 << 24
"""Largest tensor of its own, in bytes, that a loader may compute with."""


@dataclass(slots=True, eq=False)
class Node:
    """One operation.

    Attributes:
        op: torch's operation.
        args, kwargs: of the call, with a `View` for each tensor.
        results: what the returned tensors stand for, in order; None where that is no new value.
        writes: the arguments that it writes into.
        where: ``file:line`` of the loader.
        weight: a source that its values come from, or else the weight that was being loaded.
        problem: why it cannot be run again, if so; it matters only where its values land.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Computed | None, ...]
    writes: tuple[View, ...]
    where: str
    weight: str | None
    problem: str | None = None

    def views(self) -> Iterator[View]:
        """All tensors among its arguments."""
        yield from views_in(self.args)
        yield from views_in(tuple(self.kwargs.values()))


def brought(tensor: Tensor) -> View:
    """A view of the values that a real tensor has now."""
    values = None
    if not tensor.is_meta and tensor.numel() * tensor.dtype.itemsize <= MAX_BROUGHT_BYTES:
        values = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    shape = tuple(tensor.shape)
    return View(Brought(values, tensor.is_meta), tensor.dtype, 0, shape, contiguous_stride(shape))


def known_values(argument: Any) -> Tensor | None:
    """The values of an argument that the loader brought along; None for all others."""
    if isinstance(argument, View) and isinstance(argument.origin, Brought):
        return argument.origin.values
    return None


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to what its lists and tuples hold, at any depth."""
    if isinstance(value, (list, tuple)):
        return [mapped(each, change) for each in value]
    return change(value)


def views_in(value: Any) -> Iterator[View]:
    """The views in an argument."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from views_in(each)
