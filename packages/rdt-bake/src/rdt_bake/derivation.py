"""What the new storage that an operation made stands for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rdt_bake.constants import constant, element_of, factory_value, uniform_element
from rdt_bake.frames import loader_line
from rdt_bake.layouts import Dim
from rdt_bake.origins import Constant, Copied, Origin, Source
from rdt_bake.selections import SELECTIONS, progressions, selection
from rdt_bake.tensors import first_element

__all__ = ["EMPTY", "derived", "fresh"]

_aten = torch.ops.aten

_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default, _aten.alias_copy.default})
"""Operations whose result is their argument's elements, at most cast."""

EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Operations whose result holds nothing yet."""


def derived(
    func: Any, args: tuple[Any, ...], view: Tensor, origin: Origin, tensor: Tensor
) -> Constant | Copied | None:
    """What ``tensor``, a new storage that ``func`` made of ``view``, stands for without a node.

    None when its values have to be computed.
    """
    if func in _COPIES:
        if isinstance(origin, Constant):
            return constant(element_of(origin, view.dtype), tensor)
        return _copied(func, view, origin, tensor, _beside(tensor, view.stride()))
    if func is _aten.repeat.default:
        return _copied(func, view, origin, tensor, _repeated(view, tensor))
    if func in SELECTIONS and args[0] is view:
        return _selected(func, args, view, origin, tensor)
    return constant(factory_value(func, args), tensor)


def fresh(func: Any, args: tuple[Any, ...], tensor: Tensor) -> Constant | None:
    """The same for a new meta storage that ``func`` made of no tensor that stands for anything."""
    value: Any = factory_value(func, args)
    if func in _COPIES and not args[0].is_meta:
        value = uniform_element(args[0])
    return constant(value, tensor)


def _beside(tensor: Tensor, there: Sequence[int]) -> list[Dim]:
    return list(zip(tensor.shape, tensor.stride(), there, strict=True))


def _selected(
    func: Any, args: tuple[Any, ...], view: Tensor, origin: Origin, tensor: Tensor
) -> Copied | None:
    """The origin of indices of one dim that go up evenly: a slice, in other words."""
    found = selection(func, args, _known)
    steady = progressions(found[1], 1) if found is not None else None
    if found is None or not steady:
        return None
    dim, (start, step, _) = found[0], steady[0]
    there = list(view.stride())
    start *= there[dim]
    there[dim] *= step
    return _copied(func, view, origin, tensor, _beside(tensor, there), start)


def _known(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and not value.is_meta else None


def _repeated(view: Tensor, tensor: Tensor) -> list[Dim]:
    """Dims of ``view`` repeated to the shape of ``tensor``: each is gone through several times."""
    ahead = tensor.ndim - view.ndim
    own = [(1, 0)] * ahead + list(zip(view.shape, view.stride(), strict=True))
    dims: list[Dim] = []
    for whole, step, (extent, there) in zip(tensor.shape, tensor.stride(), own, strict=True):
        if extent:
            dims += [(whole // extent, step * extent, 0), (extent, step, there)]
    return dims


def _copied(
    func: Any, view: Tensor, origin: Origin, tensor: Tensor, dims: list[Dim], start: int = 0
) -> Copied | None:
    """The origin of a clone or cast of a view of a source, or of a copy of one.

    ``dims`` lie beside those of the view from its element ``start`` on.
    """
    if tensor.numel() == 0 or view.is_conj() or view.is_neg():
        return None
    if not isinstance(origin, (Source, Copied)):
        return None
    if isinstance(origin, Copied) and origin.is_cast:
        if not view.dtype == origin.dtype == tensor.dtype:
            return None  # a cast of a cast, or of a cast's bits
    try:
        offset = first_element(view) + start
        return Copied(origin, view.dtype, tensor.dtype, offset, dims, str(func), loader_line())
    except ValueError:
        return None
