"""Where the bytes of a slice land: placements and fills.

A destination is a strided region of one tensor of the consumer's model. ``module`` is the dotted
path of the module that owns it (``""`` is the root) and ``param`` the attribute's name in it.
Offsets and strides count elements of ``dtype``, from the first element of that tensor (not of its
storage).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, PlanError
from rdt_plan.slices import Slice, last_element

__all__ = ["Fill", "Placement", "Write", "check_write", "new_placement"]


class Placement(NamedTuple):  # a large plan has hundreds of thousands
    """``slice``, read from its packed bytes, is copied into one destination region.

    Attributes:
        slice: the source region, whose packed form is contiguous and in its iteration order.
        module: dotted path of the destination's module.
        param: the destination tensor's attribute name in that module.
        offset: first element of the region.
        shape: the region's shape.
        stride: the region's strides; no stride is 0 where the extent exceeds 1.
        dtype: the dtype the destination is viewed as. Equal to ``slice.dtype``: bytes are copied;
            otherwise values are cast as ``torch.Tensor.copy_`` casts them.
        source_stride: strides over the *packed* slice, one per dim of ``shape``, in elements of
            ``slice.dtype``; 0 repeats (a broadcast copy).
    """

    slice: Slice
    module: str
    param: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    source_stride: tuple[int, ...]


new_placement = cast("Callable[[tuple[Any, ...]], Placement]", partial(tuple.__new__, Placement))
"""The placement of a tuple of its fields: in half the time that ``Placement`` takes."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant written into one destination region (the padding of a vocabulary, say)."""

    module: str
    param: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    value: bool | int | float


Write = Placement | Fill


def check_write(write: Write) -> None:
    """Refuse a write that contradicts itself.

    The size of the destination is not known here; whoever installs the plan checks it.

    Raises:
        PlanError: names the destination, what was expected and what was found.

    >>> check_write(Fill("embed", "weight", 8, (2, 4), (4,), "float32", 0.0))
    Traceback (most recent call last):
    rdt_plan.errors.PlanError: embed.weight: expected one stride a dim of (2, 4), found (4,)
    """
    where = f"{write.module}.{write.param}".lstrip(".")
    strides = [write.stride]
    if isinstance(write, Placement):
        where += f", from {write.slice.name!r}"
        strides.append(write.source_stride)
    for stride in strides:
        if len(stride) != len(write.shape):
            raise PlanError(f"{where}: expected one stride a dim of {write.shape}, found {stride}")
    if min((write.offset, *write.shape, *(step for stride in strides for step in stride))) < 0:
        raise PlanError(f"{where}: expected no negative value, found {write}")
    try:
        item_bytes(write.dtype)
    except ManifestError as error:
        raise PlanError(f"{where}: {error}") from None
    if any(e > 1 and s == 0 for e, s in zip(write.shape, write.stride, strict=True)):
        raise PlanError(
            f"{where}: expected every destination element written once, found {write.stride=} "
            f"over {write.shape=}"
        )
    if isinstance(write, Placement) and prod(write.shape):
        last = last_element(0, write.shape, write.source_stride)
        if last >= write.slice.numel:
            raise PlanError(
                f"{where}: expected packed elements below {write.slice.numel}, found one at {last}"
            )
