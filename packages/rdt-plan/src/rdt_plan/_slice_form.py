"""The JSON form of a slice, written and strictly read."""

from typing import Any

from rdt_plan._fields import array, integer, integers, string
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, SliceError, WireFormatError
from rdt_plan.slices import Slice, canonical

__all__ = ["slice_form", "slice_of"]


def slice_form(slice_: Slice) -> tuple[Any, ...]:
    return (slice_.name, slice_.dtype, slice_.offset, slice_.shape, slice_.stride)


def slice_of(row: Any) -> Slice:
    name, dtype, offset, shape, stride = array(row, "slice", 5)
    slice_ = Slice(
        name=string(name, "name"),
        dtype=string(dtype, "dtype"),
        offset=integer(offset, "offset"),
        shape=integers(shape, "shape"),
        stride=integers(stride, "stride"),
    )
    try:
        item_bytes(slice_.dtype)
        expected = canonical(*row)
    except (ManifestError, SliceError) as error:
        raise WireFormatError(f"slice: {error}") from error
    if slice_ != expected:
        raise WireFormatError(f"slice: expected the canonical {expected}, found {slice_}")
    return slice_
