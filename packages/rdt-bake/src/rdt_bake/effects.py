"""What of its memory an operation that writes in place needs, and what it leaves written."""

from typing import Any

import torch
from torch import Tensor

from rdt_bake.nodes import Node, known_values
from rdt_bake.origins import View
from rdt_bake.overlaps import MAX_ELEMENTS, runs
from rdt_bake.selections import progressions, selection
from rdt_plan.slices import last_element

__all__ = ["is_whole_write", "old_values", "written_part"]

_aten = torch.ops.aten
_WHOLE = frozenset(
    {
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.zero_.default,
    }
)


def is_whole_write(node: Node) -> bool:
    """Whether every element that it writes into gets a new value, whatever was there."""
    return node.op in _WHOLE or torch.Tag.out in node.op.tags


def old_values(node: Node) -> tuple[View, ...]:
    """What it writes into and whose old values matter."""
    return () if is_whole_write(node) or written_part(node) is not None else node.writes


def written_part(node: Node) -> tuple[View, ...] | None:
    """For an operation that overwrites chosen elements, where, as disjoint ranges.

    None for all other operations, and where values of weights choose the elements.
    """
    change = _PARTIAL.get(node.op)
    if change is None:
        return None
    into = node.writes[0]
    rows = _rows(node)
    if rows is not None:
        dim, index = rows
        steady = progressions(index.unique(), index.numel()) or ()
        return tuple(into.cut(dim, at, at + count).every(dim, step) for at, step, count in steady)
    span = 1 + last_element(0, into.shape, into.stride)
    if span > MAX_ELEMENTS:
        return None
    flat = torch.zeros(span, dtype=torch.bool)
    chosen = change(flat.as_strided(into.shape, into.stride), [_known(x) for x in node.args[1:]])
    if not chosen:
        return None
    return tuple(
        View(into.origin, into.dtype, into.offset + run.offset, run.shape, run.stride)
        for run in runs(flat)
    )


def _rows(node: Node) -> tuple[int, Tensor] | None:
    """The dim and the known indices of it that the operation overwrites, if that is all it does."""
    if node.op is _aten.index_put_.default:
        accumulates = len(node.args) > 3 and node.args[3]
        return None if accumulates else selection(_aten.index.Tensor, node.args, known_values)
    if _PARTIAL[node.op] is _along:
        return selection(_aten.index_select.default, node.args, known_values)
    return None


_UNKNOWN = object()


def _known(argument: Any) -> Any:
    if isinstance(argument, View):
        values = known_values(argument)
        return _UNKNOWN if values is None else values
    if isinstance(argument, (list, tuple)):
        return [_known(each) for each in argument]
    return argument


def _put(mask: Tensor, known: list[Any]) -> bool:
    indices, accumulates = known[0], len(known) > 2 and known[2]
    if accumulates or any(each is _UNKNOWN for each in indices):
        return False
    true = torch.ones((), dtype=torch.bool)
    _aten.index_put_.default(mask, indices, true)
    return True


def _along(mask: Tensor, known: list[Any]) -> bool:
    if known[1] is _UNKNOWN:
        return False
    mask.index_fill_(known[0], known[1].long(), True)
    return True


def _masked(mask: Tensor, known: list[Any]) -> bool:
    if known[0] is _UNKNOWN:
        return False
    mask.masked_fill_(known[0], True)
    return True


def _scattered(mask: Tensor, known: list[Any]) -> bool:
    if known[1] is _UNKNOWN:
        return False
    mask.scatter_(known[0], known[1], True)
    return True


_PARTIAL: dict[Any, Any] = {
    _aten.index_put_.default: _put,
    _aten.index_copy_.default: _along,
    _aten.index_fill_.int_Scalar: _along,
    _aten.index_fill_.int_Tensor: _along,
    _aten.masked_fill_.Scalar: _masked,
    _aten.masked_fill_.Tensor: _masked,
    _aten.scatter_.src: _scattered,
    _aten.scatter_.value: _scattered,
}
