"""Which slices of the weights a program fetches, and how its operands lie in them."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from rdt_bake.origins import Source, View
from rdt_bake.tensors import dtype_name
from rdt_plan import Slice, canonical
from rdt_plan.slices import contiguous_stride, last_element

__all__ = ["Inputs"]

_ALIGNMENT = 16
"""Bytes: what is seen as several dtypes starts at a whole element of each."""


class Inputs:
    """The slices that views of weights read, each element once.

    Args:
        views: all views of weights in a program, none empty.

    A view is read in memory order, so that a weight and its transpose are one slice. Where slices
    of one weight overlap, the whole range that they span is read instead if that is less.
    """

    def __init__(self, views: Iterable[View]) -> None:
        self._read: dict[View, tuple[Slice, int, tuple[int, ...]]] = {}
        by_name: dict[str, dict[View, Slice]] = defaultdict(dict)
        for view in views:
            by_name[_name(view)][view] = _in_memory_order(view)
        for own in by_name.values():
            self._choose(own)

    def read(self, view: View) -> tuple[Slice, int, tuple[int, ...]]:
        """The slice, and the view's first element and strides in its packed elements."""
        return self._read[view]

    def _choose(self, slices: dict[View, Slice]) -> None:
        cluster: list[View] = []
        end = 0
        for view in sorted(slices, key=lambda each: _bytes(slices[each])):
            start, stop = _bytes(slices[view])
            if cluster and start >= end:
                self._read_cluster(cluster, slices)
                cluster = []
            end = max(end, stop) if cluster else stop
            cluster.append(view)
        self._read_cluster(cluster, slices)

    def _read_cluster(self, views: list[View], slices: dict[View, Slice]) -> None:
        """Views whose slices overlap: each its own slice, or all of them one range."""
        distinct = {slices[view] for view in views}
        dtypes = {view.dtype for view in views}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        item = dtype.itemsize
        unit = item if not dtypes else _ALIGNMENT
        start = min(_bytes(each)[0] for each in distinct) // unit * unit
        stop = max(_bytes(each)[1] for each in distinct)
        if sum(each.num_bytes for each in distinct) <= stop - start:
            for view in views:
                self._read[view] = slices[view], 0, _packed_stride(view)
            return
        name, numel = _name(views[0]), (stop - start) // item
        span = canonical(name, dtype_name(dtype), start // item, (numel,), (1,))
        for view in views:
            offset = view.offset - start // view.dtype.itemsize
            self._read[view] = span, offset, view.stride


def _name(view: View) -> str:
    assert isinstance(view.origin, Source)
    return view.origin.name


def _moving(view: View) -> list[int]:
    """The dims that step through memory, largest step first."""
    dims = [dim for dim, extent in enumerate(view.shape) if extent > 1 and view.stride[dim]]
    return sorted(dims, key=lambda dim: (view.stride[dim], view.shape[dim]), reverse=True)


def _in_memory_order(view: View) -> Slice:
    dims = _moving(view)
    shape, stride = [view.shape[dim] for dim in dims], [view.stride[dim] for dim in dims]
    return canonical(_name(view), dtype_name(view.dtype), view.offset, shape, stride)


def _packed_stride(view: View) -> tuple[int, ...]:
    dims = _moving(view)
    steps = contiguous_stride([view.shape[dim] for dim in dims])
    packed = dict(zip(dims, steps, strict=True))
    return tuple(packed.get(dim, 0) for dim in range(len(view.shape)))


def _bytes(slice_: Slice) -> tuple[int, int]:
    item = getattr(torch, slice_.dtype).itemsize
    last = last_element(slice_.offset, slice_.shape, slice_.stride)
    return slice_.offset * item, (last + 1) * item
