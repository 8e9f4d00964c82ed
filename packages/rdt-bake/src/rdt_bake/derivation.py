"""What the new storage that an operation made stands for."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.constants import factory_value, number, uniform_element
from rdt_bake.errors import UnsupportedTensorError
from rdt_bake.frames import loader_line
from rdt_bake.ledger import Ledger
from rdt_bake.origins import Computed, Constant, Copied, Origin, Source
from rdt_bake.tensors import first_element

__all__ = ["COPIES", "derived", "fresh"]

_aten = torch.ops.aten

COPIES = frozenset({_aten.clone.default, _aten._to_copy.default, _aten.alias_copy.default})
"""Operations whose result is their argument's elements, at most cast."""


def derived(
    func: Any,
    args: tuple[Any, ...],
    inputs: list[tuple[Tensor, Origin]],
    tensor: Tensor,
    ledger: Ledger,
) -> Origin:
    """The origin of ``tensor``, a new storage that ``func`` made of tensors with origins."""
    view, origin = inputs[0]
    found: Origin | None = None
    if func in COPIES:
        if isinstance(origin, Computed):
            return origin
        if isinstance(origin, Constant):
            element = torch.empty((), dtype=view.dtype).fill_(origin.value)
            found = _constant(element, tensor)
        else:
            found = _copied(func, view, origin, tensor)
    else:
        found = _constant(factory_value(func, args), tensor)
    return found or Computed(
        str(func), loader_line(), ledger.weight_of(inputs), ledger.is_derived(inputs)
    )


def fresh(func: Any, args: tuple[Any, ...], tensor: Tensor, ledger: Ledger) -> Origin:
    """The origin of ``tensor``, a new meta storage that ``func`` made of no tensor with one."""
    value: Any = factory_value(func, args)
    if func in COPIES and not args[0].is_meta:
        value = uniform_element(args[0])
    constant = _constant(value, tensor)
    return constant or Computed(str(func), loader_line(), ledger.current, False)


def _constant(value: Any, tensor: Tensor) -> Constant | None:
    """The origin of a tensor full of ``value``; None without one, or when it has no such number."""
    if value is None:
        return None
    try:
        return Constant(number(value, tensor.dtype))
    except UnsupportedTensorError:
        return None


def _copied(func: Any, view: Tensor, origin: Origin, tensor: Tensor) -> Copied | None:
    """The origin of a clone or cast of a view of a source, or of a copy of one."""
    if tensor.numel() == 0 or view.is_conj() or view.is_neg():
        return None
    if not isinstance(origin, (Source, Copied)):
        return None
    if isinstance(origin, Copied) and origin.is_cast:
        if not view.dtype == origin.dtype == tensor.dtype:
            return None  # a cast of a cast, or of a cast's bits
    dims = list(zip(view.shape, tensor.stride(), view.stride(), strict=True))
    try:
        return Copied(
            origin, view.dtype, tensor.dtype, first_element(view), dims, str(func), loader_line()
        )
    except ValueError:
        return None
