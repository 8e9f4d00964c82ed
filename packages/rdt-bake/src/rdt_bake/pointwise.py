"""Operations of which a part of the result needs a part of the operands.

An operation's *frame* is the index space of what it makes, or of the view it writes into; a box of
the frame (half-open ranges of indices) is a part of the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rdt_bake.nodes import Node, brought, known_values, mapped
from rdt_bake.origins import View
from rdt_bake.regions import Box

__all__ = ["dense_stride", "frame", "part_of"]

_aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.zero_.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.masked_fill_.Scalar,
        _aten.masked_fill_.Tensor,
    }
)


def frame(node: Node) -> View | None:
    """What ``node`` makes or writes into, if a part of it can be made alone."""
    if node.problem is not None or len(node.results) + len(node.writes) != 1:
        return None
    if node.writes:
        made = node.writes[0]
        if made is not node.args[0]:
            return None
    else:
        (origin,) = node.results
        if origin is None:
            return None
        made = View(origin, origin.dtype, 0, origin.shape, origin.stride)
    if node.op is _aten.index_select.default and known_values(node.args[2]) is None:
        return None
    if node.op is _aten.index.Tensor:
        view, indices = node.args
        if len(view.shape) != 1 or [each.shape for each in indices] != [made.shape]:
            return None
    if node.op is _aten.cat.default and len({view.dtype for view in node.views()}) > 1:
        return None  # a part of it would be of another dtype
    if node.op in _PARTS:
        return made
    if node.op not in _ELEMENTWISE and torch.Tag.pointwise not in node.op.tags:
        return None
    return made if all(_broadcasts(view, made) for view in node.views()) else None


def part_of(node: Node, made: View, box: Box) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which ``node`` makes only ``box`` of its frame ``made``."""
    part = _PARTS.get(node.op)
    if part is not None:
        return part(node, made, box), node.kwargs

    def cut(value: Any) -> Any:
        return _broadcast_part(value, made, box) if isinstance(value, View) else value

    args = tuple(mapped(argument, cut) for argument in node.args)
    return args, {key: mapped(argument, cut) for key, argument in node.kwargs.items()}


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of ``shape`` whose dims are nested as those of ``like``.

    >>> dense_stride((2, 3), (1, 9))
    (1, 2)
    """
    stride, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _broadcasts(view: View, made: View) -> bool:
    ahead = len(made.shape) - len(view.shape)
    return ahead >= 0 and all(
        own in (1, extent) for own, extent in zip(view.shape, made.shape[ahead:], strict=True)
    )


def _broadcast_part(view: View, made: View, box: Box) -> View:
    ahead = len(made.shape) - len(view.shape)
    for dim, (lo, hi) in enumerate(box[ahead:]):
        if view.shape[dim] == made.shape[ahead + dim]:
            view = view.cut(dim, lo, hi)
    return view


def _full(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    return [hi - lo for lo, hi in box], node.args[1]


def _empty(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    extents = [hi - lo for lo, hi in box]
    return extents, dense_stride(extents, made.stride)


def _cat(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(made.shape)
    parts, start = [], 0
    for view in node.args[0]:
        if view.shape == (0,) and len(made.shape) > 1:
            continue
        extent = view.shape[dim]
        lo, hi = max(box[dim][0] - start, 0), min(box[dim][1] - start, extent)
        start += extent
        if lo < hi:
            for other, (first, last) in enumerate(box):
                view = view.cut(other, *((lo, hi) if other == dim else (first, last)))
            parts.append(view)
    return parts, dim


def _flip(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    view, dims = node.args[0], {dim % len(box) for dim in node.args[1]}
    for dim, (lo, hi) in enumerate(box):
        extent = made.shape[dim]
        view = view.cut(dim, *((extent - hi, extent - lo) if dim in dims else (lo, hi)))
    return view, node.args[1]


def _index_select(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    view, dim, index = node.args
    dim %= len(box)
    chosen = index.origin.values[slice(*box[dim])]
    first, last = int(chosen.min()), int(chosen.max())
    for other, (lo, hi) in enumerate(box):
        view = view.cut(other, *((first, last + 1) if other == dim else (lo, hi)))
    return view, dim, brought(chosen - first)


def _look_up(node: Node, made: View, box: Box) -> tuple[Any, ...]:
    """A table of one dim, indexed by what has the shape of the result."""
    return node.args[0], [_broadcast_part(node.args[1][0], made, box)]


_PARTS: dict[Any, Callable[[Node, View, Box], tuple[Any, ...]]] = {
    _aten.full.default: _full,
    _aten.empty_strided.default: _empty,
    _aten.cat.default: _cat,
    _aten.flip.default: _flip,
    _aten.index_select.default: _index_select,
    _aten.index.Tensor: _look_up,
}
