"""Strided regions of a source tensor, and their algebra.

A `Slice` says *which* elements of one full, contiguous source tensor are read and in what order;
it replaces the chain of view operations that led there, so equal regions are equal keys and no
operation's name ever crosses the wire.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rdt_plan.dtypes import ITEM_BYTES, item_bytes
from rdt_plan.errors import SliceError

if TYPE_CHECKING:
    from rdt_plan.manifest import ParamMeta

__all__ = [
    "Slice",
    "bytes_of",
    "canonical",
    "check_bounds",
    "contiguous_stride",
    "last_element",
    "new_slice",
    "whole",
]


class Slice(NamedTuple):
    """A canonical strided region of the contiguous source tensor ``name``.

    That tensor is the full one, or, in a chunk, what the chunk's owner holds of it.

    Attributes:
        name: the source tensor's name in the manifest.
        dtype: the dtype the source is viewed as; may differ from the manifest's.
        offset: first element, counted in elements of ``dtype`` from the tensor's start.
        shape: extents, outermost first. ``()`` is one element.
        stride: one per dim, in elements of ``dtype``. Never 0: repeats belong to the placement.
    """

    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


new_slice = cast("Callable[[tuple[Any, ...]], Slice]", partial(tuple.__new__, Slice))
"""The slice of a tuple of its fields: in half the time that ``Slice`` takes."""


def bytes_of(slices: Iterable[Slice]) -> list[int]:
    """Bytes of each of many slices."""
    return [prod(slice_[3]) * ITEM_BYTES[slice_[1]] for slice_ in slices]


def canonical(
    name: str, dtype: str, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Slice:
    """The one spelling of a region: equal regions in equal iteration order give equal slices.

    Dims of extent 1 are dropped, dims that iterate as one are merged, the order of iteration
    stays. An empty region is ``offset=0, shape=(0,), stride=(1,)``.

    Raises:
        SliceError: shape and stride differ in length, a value is negative, or a dim of more than
            one element has stride 0 (repeats belong to the placement).

    >>> canonical("w", "int8", 6, (1, 2, 3), (99, 3, 1))
    Slice(name='w', dtype='int8', offset=6, shape=(6,), stride=(1,))
    >>> canonical("w", "int8", 0, (3, 2), (1, 3)).shape
    (3, 2)
    """
    if len(shape) != len(stride):
        raise SliceError(f"{name!r}: expected one stride a dim, found {shape=} and {stride=}")
    if offset < 0 or (shape and (min(shape) < 0 or min(stride) < 0)):
        raise SliceError(
            f"{name!r}: expected no negative value, found {offset=}, {shape=}, {stride=}"
        )
    extents: list[int] = []
    steps: list[int] = []
    repeats = False
    for extent, step in zip(shape, stride, strict=True):
        if extent == 0:
            return Slice(name, dtype, 0, (0,), (1,))
        if extent == 1:
            continue
        repeats = repeats or step == 0
        if steps and steps[-1] == step * extent:
            extents[-1] *= extent
            steps[-1] = step
        else:
            extents.append(extent)
            steps.append(step)
    if repeats:
        raise SliceError(
            f"{name!r}: found {stride=} of 0 over more than one element of {shape=}; "
            f"read the element once and repeat it in the placement's source_stride"
        )
    return Slice(name, dtype, offset, tuple(extents), tuple(steps))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``.

    >>> contiguous_stride((4, 3, 2))
    (6, 2, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def whole(meta: "ParamMeta") -> Slice:
    """All of ``meta``, in order.

    >>> from rdt_plan import ParamMeta
    >>> whole(ParamMeta("w", "int8", (4, 3)))
    Slice(name='w', dtype='int8', offset=0, shape=(12,), stride=(1,))
    """
    return canonical(meta.name, meta.dtype, 0, meta.shape, contiguous_stride(meta.shape))


def last_element(offset: int, shape: Sequence[int], stride: Sequence[int]) -> int:
    """The highest element that a region of at least one element touches.

    >>> last_element(1, (2, 3), (10, 2))
    15
    """
    for extent, step in zip(shape, stride, strict=True):
        offset += (extent - 1) * step
    return offset


def check_bounds(slice_: Slice, meta: "ParamMeta") -> None:
    """Refuse a slice that is not canonical or leaves the tensor that ``meta`` describes.

    Raises:
        SliceError: names the tensor, what was expected and what was found.

    >>> from rdt_plan import ParamMeta
    >>> check_bounds(Slice("w", "int8", 0, (13,), (1,)), ParamMeta("w", "int8", (4, 3)))
    Traceback (most recent call last):
    rdt_plan.errors.SliceError: 'w': expected a slice within its 12 bytes, found one that ends \
at byte 13: Slice(name='w', dtype='int8', offset=0, shape=(13,), stride=(1,))
    """
    if slice_.name != meta.name:
        raise SliceError(f"expected a slice of {meta.name!r}, found one of {slice_.name!r}")
    expected = canonical(slice_.name, slice_.dtype, slice_.offset, slice_.shape, slice_.stride)
    if slice_ != expected:
        raise SliceError(f"{meta.name!r}: expected the canonical {expected}, found {slice_}")
    if 0 in slice_.shape:
        return
    end = (last_element(slice_.offset, slice_.shape, slice_.stride) + 1) * item_bytes(slice_.dtype)
    if end > meta.num_bytes:
        raise SliceError(
            f"{meta.name!r}: expected a slice within its {meta.num_bytes} bytes, "
            f"found one that ends at byte {end}: {slice_}"
        )
