"""Numbers a loader writes that come from no weight."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.errors import UnsupportedTensorError
from rdt_bake.origins import Constant

__all__ = ["constant", "element_of", "factory_value", "number", "uniform_element"]

_aten = torch.ops.aten
_FILLED_AT = {
    _aten.scalar_tensor.default: 0,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.new_full.default: 2,
}
_FILLED_WITH = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}


def factory_value(func: Any, args: tuple[Any, ...]) -> bool | int | float | complex | None:
    """The number that a call of ``func`` fills its result with; None when it does not."""
    if func in _FILLED_WITH:
        return _FILLED_WITH[func]
    at = _FILLED_AT.get(func)
    return args[at] if at is not None and len(args) > at else None


def number(value: Tensor | bool | int | float | complex, dtype: torch.dtype) -> bool | int | float:
    """``value`` as an element of ``dtype``, by torch's own cast.

    Raises:
        UnsupportedTensorError: ``dtype`` has no such number, or the number is complex.
    """
    try:
        element = torch.empty((), dtype=dtype)
        if isinstance(value, Tensor):
            element.copy_(value.reshape(()))
        else:
            element.fill_(value)
        found = element.item()
    except (NotImplementedError, RuntimeError, ValueError, OverflowError) as error:
        raise UnsupportedTensorError(f"{value!r} is no number of {dtype}: {error}") from error
    if isinstance(found, complex):
        if found.imag:
            raise UnsupportedTensorError(f"a fill with the complex number {found} is not supported")
        return found.real
    return found


def constant(value: Any, tensor: Tensor) -> Constant | None:
    """The origin of a tensor full of ``value``; None without one, or when it has no such number."""
    if value is None:
        return None
    try:
        element = number(value, tensor.dtype)
    except UnsupportedTensorError:
        return None
    return Constant(element, tensor.dtype, tuple(tensor.shape), tensor.stride())


def element_of(constant: Constant, dtype: torch.dtype) -> Tensor | None:
    """One element of ``dtype``, bit for bit, in memory full of a constant; None if they differ."""
    bits = torch.full((1,), constant.value, dtype=constant.dtype).view(torch.uint8)
    if bits.numel() % dtype.itemsize and dtype.itemsize % bits.numel():
        return None
    return uniform_element(bits.repeat(-(-dtype.itemsize // bits.numel())).view(dtype))


def uniform_element(tensor: Tensor) -> Tensor | None:
    """The one element that all of a real ``tensor``'s are bit for bit equal to, if so."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    flat = tensor.detach().reshape(-1)
    bits = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)
    return flat[0] if bool((bits == bits[0]).all()) else None
