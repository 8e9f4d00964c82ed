"""Packing: the strided slices of one chunk into bytes in the layout both sides share."""

from collections.abc import Mapping

import torch

from rdt_plan import LayoutError, ParamMeta, ServeChunk, SliceError
from rdt_transport.chunk_copies import pack_copies
from rdt_transport.copies import CopyTable

__all__ = ["PackList", "check_held", "check_source", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name; raises `SliceError` for a name torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SliceError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def check_source(meta: ParamMeta, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the contiguous source that ``meta`` describes: itself, or a contiguous copy.

    Raises `SliceError` when its shape or dtype is not the manifest's.
    """
    dtype = torch_dtype(meta.dtype)
    if tuple(tensor.shape) != meta.shape or tensor.dtype != dtype:
        raise SliceError(
            f"{meta.name}: the manifest says {meta.dtype}{list(meta.shape)}, the source yielded "
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}; "
            "yield tensors exactly as metadata() declares them"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_held(meta: ParamMeta, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """`check_source` for what ``rank`` holds of ``meta``: the whole, or its piece over a mesh."""
    held = meta.held_by(rank)
    if held is None:
        raise SliceError(
            f"{meta.name}: rank {rank} yielded a tensor, but the manifest says that ranks "
            f"{meta.holders} hold it; yield only what metadata() says this rank holds"
        )
    return check_source(held, tensor)


class PackList:
    """The copies that fill one serve slot with one chunk.

    Args:
        chunk: the row of the chunk table; one that has a slot.
        packed: uint8, 1-D, at least ``chunk.num_bytes`` long; kept.

    Raises:
        LayoutError: ``packed`` is too short.
    """

    def __init__(self, chunk: ServeChunk, packed: torch.Tensor) -> None:
        if packed.numel() < chunk.num_bytes:
            raise LayoutError(
                f"chunk seq {chunk.seq} packs {chunk.num_bytes} bytes, its serve slot has "
                f"{packed.numel()}"
            )
        self._packed = packed
        self._names = list(dict.fromkeys(region.name for region in chunk.slices))
        copies = pack_copies(chunk, self._names)
        self._table = CopyTable(copies, packed.device, source_names=self._names)

    def prepare(self) -> None:
        """See `CopyTable.prepare`."""
        self._table.prepare()

    def run(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Copy, on the current stream; ``sources`` are full and contiguous (`check_source`).

        They, like the slot, must live until that work is done.

        Raises:
            SliceError: a source is missing, too small, or not on the slot's device; names it.
        """
        missing = [name for name in self._names if name not in sources]
        if missing:
            raise SliceError(f"{missing[0]}: it cannot be read: no such source was published")
        self._table.run([sources[name] for name in self._names], [self._packed])
