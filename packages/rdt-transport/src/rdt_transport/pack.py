"""Packing: the strided slices of one chunk into contiguous bytes, by the layout both sides share.

The plain path is one `torch._foreach_copy_` over views, built once per (chunk, sources, slot).
"""

from collections.abc import Mapping, Sequence

import torch

from rdt_plan import LayoutError, ParamMeta, ServeChunk, Slice, SliceError
from rdt_plan.layout import ALIGNMENT

__all__ = ["PackList", "check_held", "check_source", "read_slice", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name; raises `SliceError` for a name torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SliceError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def check_source(meta: ParamMeta, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the contiguous source that ``meta`` describes: itself, or a contiguous copy.

    Its bytes start at a multiple of 16, in memory and in its storage, so that slices of a larger
    dtype can be viewed in it.

    Raises `SliceError` when its shape or dtype is not the manifest's.
    """
    dtype = torch_dtype(meta.dtype)
    if tuple(tensor.shape) != meta.shape or tensor.dtype != dtype:
        raise SliceError(
            f"{meta.name}: the manifest says {meta.dtype}{list(meta.shape)}, the source yielded "
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}; "
            "yield tensors exactly as metadata() declares them"
        )
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    start = source.storage_offset() * source.element_size()
    return source.clone() if source.data_ptr() % ALIGNMENT or start % ALIGNMENT else source


def check_held(meta: ParamMeta, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """`check_source` for what ``rank`` holds of ``meta``: the whole, or its piece over a mesh."""
    held = meta.held_by(rank)
    if held is None:
        raise SliceError(
            f"{meta.name}: rank {rank} yielded a tensor, but the manifest says that ranks "
            f"{meta.holders} hold it; yield only what metadata() says this rank holds"
        )
    return check_source(held, tensor)


def read_slice(tensor: torch.Tensor, region: Slice) -> torch.Tensor:
    """The strided view of ``region`` in the full, contiguous source ``tensor``; no copy.

    The slice's offset counts from the tensor's first element, so the tensor's own storage offset
    is added here.
    """
    dtype = torch_dtype(region.dtype)
    if tensor.dtype != dtype:
        # Not `reshape`: the stride of a lone element may be any, and such a one has no bytes' view.
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        tensor = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return tensor.as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)


def _packed_views(
    slices: Sequence[Slice], offsets: Sequence[int], packed: torch.Tensor
) -> list[torch.Tensor]:
    return [
        packed[offset : offset + region.num_bytes]
        .view(torch_dtype(region.dtype))
        .view(region.shape)
        for region, offset in zip(slices, offsets, strict=True)
        if region.numel
    ]


def _read(sources: Mapping[str, torch.Tensor], region: Slice) -> torch.Tensor:
    try:
        return read_slice(sources[region.name], region)
    except (KeyError, RuntimeError) as error:
        raise SliceError(f"{region.name}: {region} cannot be read: {error}") from error


class PackList:
    """The copies that fill one serve slot with one chunk.

    Args:
        chunk: the row of the chunk table.
        packed: uint8, 1-D, at least ``chunk.num_bytes`` long, 16-byte aligned; not owned.

    The destination views are made once; `run` makes the source views of this epoch's tensors.
    """

    def __init__(self, chunk: ServeChunk, packed: torch.Tensor) -> None:
        if packed.numel() < chunk.num_bytes:
            raise LayoutError(
                f"chunk seq {chunk.seq} packs {chunk.num_bytes} bytes, its serve slot has "
                f"{packed.numel()}"
            )
        self._slices = [region for region in chunk.slices if region.numel]
        self._views = _packed_views(chunk.slices, chunk.offsets, packed)

    def run(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Copy, on the current stream; ``sources`` are full and contiguous (`check_source`)."""
        if self._slices:
            regions = [_read(sources, region) for region in self._slices]
            torch._foreach_copy_(self._views, regions)
