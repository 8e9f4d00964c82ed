"""Which copies pack one chunk, and which scatter it."""

from collections.abc import Sequence
from typing import NamedTuple

from rdt_plan import Chunk, Placement, ServeChunk, SliceError
from rdt_plan.dtypes import item_bytes
from rdt_plan.slices import contiguous_stride
from rdt_plan.staging import is_staging
from rdt_transport.copies import Copy

__all__ = ["ScatterCopies", "pack_copies", "scatter_copies"]


def pack_copies(chunk: ServeChunk, names: Sequence[str]) -> list[Copy]:
    """The copies that pack ``chunk``: from what its owner holds of each of ``names`` to one slot.

    Args:
        chunk: one that has a slot.
        names: of the sources, in the order that `CopyTable.run` will get them.

    Raises:
        SliceError: a slice's name is not among them.
    """
    index_of = {name: index for index, name in enumerate(names)}
    copies = []
    for region, start in zip(chunk.slices, chunk.offsets, strict=True):
        if region.name not in index_of:
            raise SliceError(f"{region.name}: {region} has no source among {len(names)} names")
        item = item_bytes(region.dtype)
        strides = contiguous_stride(region.shape)
        copies.append(
            Copy(
                source=index_of[region.name],
                target=0,
                source_offset=region.offset * item,
                target_offset=start,
                shape=region.shape,
                source_strides=region.stride,
                target_strides=strides,
                item_bytes=item,
            )
        )
    return copies


class ScatterCopies(NamedTuple):
    """What is to be done with one packed chunk.

    Attributes:
        copies: from the packed bytes, source 0, to ``targets``.
        targets: (module, param) of each base, in the order that `CopyTable.run` takes them.
        others: placements that are more than copies of bits, or go elsewhere: those that cast or
            repeat, and those into a program's inputs.
    """

    copies: tuple[Copy, ...]
    targets: tuple[tuple[str, str], ...]
    others: tuple[Placement, ...]


def scatter_copies(chunk: Chunk) -> ScatterCopies:
    """Sort ``chunk``'s placements into plain copies and all others; its slot holds every slice."""
    starts = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
    targets: dict[tuple[str, str], int] = {}
    copies, others = [], []
    for placement in chunk.placements:
        if not _is_plain(placement):
            others.append(placement)
            continue
        item = item_bytes(placement.dtype)
        copies.append(
            Copy(
                source=0,
                target=targets.setdefault((placement.module, placement.param), len(targets)),
                source_offset=starts[placement.slice],
                target_offset=placement.offset * item,
                shape=placement.shape,
                source_strides=placement.source_stride,
                target_strides=placement.stride,
                item_bytes=item,
            )
        )
    return ScatterCopies(tuple(copies), tuple(targets), tuple(others))


def _is_plain(placement: Placement) -> bool:
    repeats = any(
        extent > 1 and not step
        for extent, step in zip(placement.shape, placement.source_stride, strict=True)
    )
    is_cast = placement.dtype != placement.slice.dtype
    return not (is_cast or repeats or is_staging(placement.param))
