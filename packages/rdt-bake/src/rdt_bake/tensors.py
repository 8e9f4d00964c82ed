"""What tells tensors apart: their class, their storage, and how they see it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "always_views",
    "dtype_name",
    "first_element",
    "geometry",
    "has_storage",
    "is_composite",
    "is_foreign",
    "storage_key",
    "tensors_in",
]

_NO_DISPATCH = (None, torch.Tensor.__torch_dispatch__)


_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without ``torch.``."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as that is alive."""
    return tensor.untyped_storage()._cdata


def first_element(tensor: Tensor) -> int:
    """Where the tensor starts in its storage, in its own elements."""
    return int(tensor.storage_offset())


def geometry(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Which memory the tensor is, and how it sees it: what rebinding it changes."""
    return (
        storage_key(tensor),
        first_element(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor is strided memory, so that its storage says what it stands for."""
    return tensor.layout is torch.strided


def is_foreign(kind: type) -> bool:
    """Whether tensors of this class dispatch operations themselves, so storage says nothing."""
    return getattr(kind, "__torch_dispatch__", None) not in _NO_DISPATCH


def always_views(func: Any) -> bool:
    """Whether every result of the operation is a view of an argument, whatever that looks like.

    The schema alone does not say so: one that is composed of others (``reshape``) may copy.
    """
    returns = func._schema.returns
    return (
        bool(returns)
        and all(each.alias_info and not each.alias_info.is_write for each in returns)
        and not is_composite(func)
    )


def is_composite(func: Any) -> bool:
    """Whether the operation is composed of others on every device."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in ``values``: arguments and lists of arguments, as operators take them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
