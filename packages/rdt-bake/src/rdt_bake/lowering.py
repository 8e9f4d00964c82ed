"""Spelling a trace with less: only weights, values that came along, and what nodes make.

Copies that were looked through become nodes where they are no plain region of a weight. What only
moves elements about (a stack, a padding, a roll) is spelled with copies of parts, so that a part of
the result needs a part of the operands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rdt_bake.layouts import MAX_PIECES, Piece
from rdt_bake.narrowing import layout_of
from rdt_bake.nodes import Node, brought, known_values, mapped
from rdt_bake.origins import Computed, Copied, Source, View
from rdt_bake.selections import SELECTIONS, progressions, selection

__all__ = ["lowered"]

_aten = torch.ops.aten


def lowered(nodes: Sequence[Node], sources: Mapping[str, Source]) -> list[Node]:
    """``nodes`` with views of weights, destinations, constants and computed values alone."""
    lowering = _Lowering(sources)
    for node in nodes:
        lowering.add(node)
    return lowering.nodes


class _Lowering:
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.nodes: list[Node] = []
        self._sources = sources
        self._copies: dict[Copied, Computed] = {}

    def add(self, node: Node) -> None:
        def plain(value: Any) -> Any:
            return self._plain(value, node) if isinstance(value, View) else value

        written = {id(view): view for view in node.writes}
        args = tuple(mapped(argument, plain) for argument in node.args)
        kwargs = {key: mapped(argument, plain) for key, argument in node.kwargs.items()}
        assert all(not isinstance(view.origin, Copied) for view in written.values())
        node = replace(node, args=args, kwargs=kwargs)
        self.nodes += _SPELLED.get(node.op, _itself)(node)

    def _plain(self, view: View, node: Node) -> View:
        origin = view.origin
        if not isinstance(origin, Copied):
            return view
        return self._direct(view, origin) or replace(view, origin=self._copy(origin, node))

    def _direct(self, view: View, copied: Copied) -> View | None:
        """The view as one of the weight itself, when it is an evenly strided one."""
        if copied.is_cast or 0 in view.shape:
            return None
        regions = copied.regions(view.dtype, view.offset, view.shape, view.stride)
        if regions is None or len(regions) != 1:
            return None
        (region,) = regions
        stride: dict[int, int] = {}
        reach: dict[int, int] = {}
        for (axis, step), extent, there in zip(
            region.steps, region.shape, region.stride, strict=True
        ):
            reach[axis] = reach.get(axis, 0) + (extent - 1) * step
            if stride.setdefault(axis, there // step) * step != there:
                return None
        if any(reach.get(axis, 0) != extent - 1 for axis, extent in enumerate(view.shape)):
            return None
        steps = tuple(stride.get(axis, 0) for axis in range(len(view.shape)))
        return View(self._sources[region.name], region.dtype, region.offset, view.shape, steps)

    def _copy(self, copied: Copied, node: Node) -> Computed:
        """What holds the copy, made where it is first needed."""
        made = self._copies.get(copied)
        if made is None:
            viewed, whole = copied.viewed, copied.whole
            dtype, shape, stride = whole.dtype, whole.shape, whole.stride
            made = Computed(copied.op, copied.where, copied.name, True, dtype, shape, stride)
            self._copies[copied] = made
            op, kwargs = _aten.clone.default, {}
            if copied.dtype != viewed.dtype:
                op, kwargs = _aten._to_copy.default, {"dtype": copied.dtype}
            args = (self._plain(viewed, node),)
            self.nodes.append(Node(op, args, kwargs, (made,), (), copied.where, copied.name))
        return made


def _itself(node: Node) -> list[Node]:
    return [node]


def _stack(node: Node) -> list[Node]:
    views = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % (len(views[0].shape) + 1)
    parts = [
        replace(
            view,
            shape=(*view.shape[:dim], 1, *view.shape[dim:]),
            stride=(*view.stride[:dim], 0, *view.stride[dim:]),
        )
        for view in views
    ]
    return [replace(node, op=_aten.cat.default, args=(parts, dim))]


def _pad(node: Node) -> list[Node]:
    view, pads = node.args[:2]
    value = node.args[2] if len(node.args) > 2 else 0
    (made,) = node.results
    if made is None or min(pads, default=0) < 0:
        return [node]
    inner = View(made, made.dtype, 0, made.shape, made.stride)
    for at in range(len(pads) // 2):
        dim = len(view.shape) - 1 - at
        inner = inner.cut(dim, pads[2 * at], pads[2 * at] + view.shape[dim])
    full = replace(
        node, op=_aten.full.default, args=(list(made.shape), value), kwargs=_made_as(made)
    )
    copy = replace(node, op=_aten.copy_.default, args=(inner, view), results=(), writes=(inner,))
    return [full, copy]


def _roll(node: Node) -> list[Node]:
    view, shifts = node.args[:2]
    dims = node.args[2] if len(node.args) > 2 else []
    if len(shifts) != 1 or len(dims) != 1 or 0 in view.shape:
        return [node]
    dim = dims[0] % len(view.shape)
    extent = view.shape[dim]
    cut = -shifts[0] % extent
    parts = [view.cut(dim, cut, extent), view.cut(dim, 0, cut)]
    return [replace(node, op=_aten.cat.default, args=(parts, dim))]


def _select(node: Node) -> list[Node]:
    found = selection(node.op, node.args, known_values)
    if found is None:
        return [node]
    view, (dim, index) = node.args[0], found
    steady = progressions(index, MAX_PIECES)
    if not steady:
        args = (view, dim, brought(index))
        return [replace(node, op=_aten.index_select.default, args=args)]
    parts = [view.cut(dim, at, at + count).every(dim, step) for at, step, count in steady]
    return [replace(node, op=_aten.cat.default, args=(parts, dim))]


def _copy(node: Node) -> list[Node]:
    """A copy of what lies unevenly in the dims of a computed value, as copies of what does not."""
    into, view = node.args[:2]
    made = view.origin
    if type(made) is not Computed or view.shape != into.shape or 0 in view.shape:
        return [node]
    layout = layout_of(made)
    if layout is None or view.dtype.itemsize != made.dtype.itemsize:
        return [node]
    pieces = layout.trace(view.offset, view.shape, view.stride) or ()
    if len(pieces) < 2:
        return [node]
    nodes = []
    for piece in pieces:
        own = _part(into, piece)
        nodes.append(replace(node, args=(own, _part(view, piece)), writes=(own,)))
    return nodes


def _part(view: View, piece: Piece) -> View:
    """What of ``view`` lies beside ``piece``."""
    offset = sum(at * step for at, step in zip(piece.start, view.stride, strict=True))
    stride = tuple(view.stride[axis] * step for axis, step in piece.steps)
    return View(view.origin, view.dtype, view.offset + offset, piece.shape, stride)


def _made_as(made: Computed) -> dict[str, Any]:
    return {"dtype": made.dtype, "device": torch.device("meta")}


_SPELLED: dict[Any, Any] = {
    _aten.stack.default: _stack,
    _aten.constant_pad_nd.default: _pad,
    _aten.roll.default: _roll,
    _aten.copy_.default: _copy,
    **dict.fromkeys(SELECTIONS, _select),
}
