"""Tensors as the memory they are: byte by byte, and as regions of any dtype."""

import torch
from torch import Tensor

from rdt_bake.errors import ReplayError
from rdt_bake.tensors import first_element

__all__ = ["flat_bytes", "span", "view_memory"]


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first of a region that is not empty to its last, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def view_memory(
    tensor: Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    what: str,
) -> Tensor:
    """A region of the tensor's memory, counted in ``dtype`` from its first element.

    Raises:
        ReplayError: the region leaves the tensor's storage, which torch would silently enlarge, or
            the tensor starts at no whole element of ``dtype``; names it as ``what``.
    """
    start = first_element(tensor) * tensor.dtype.itemsize
    first, rest = divmod(start, dtype.itemsize)
    if rest:
        raise ReplayError(
            f"{what}: it starts at byte {start} of its storage, expected a multiple of the "
            f"{dtype.itemsize} bytes of {dtype}; clone it to view it so"
        )
    storage = tensor.untyped_storage()
    stop = 0 if 0 in shape else (first + offset + span(shape, stride)) * dtype.itemsize
    if offset < 0 or stop > storage.nbytes():
        raise ReplayError(
            f"{what}: the region ends at byte {stop - start}, found {storage.nbytes() - start} "
            f"bytes in a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        )
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        storage, first + offset, shape, stride
    )


def flat_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a contiguous tensor's values, as 1-D uint8."""
    tensor = tensor.resolve_conj().resolve_neg()  # bits that change what the bytes stand for
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        first_element(tensor) * tensor.dtype.itemsize,
        (num_bytes,),
        (1,),
    )
