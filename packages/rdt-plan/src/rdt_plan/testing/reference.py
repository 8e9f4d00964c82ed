"""What slices, placements and chunks mean, spelled out on plain bytes, one element at a time."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import mul

from rdt_plan.chunks import ServeChunk
from rdt_plan.dtypes import item_bytes
from rdt_plan.manifest import ParamMeta
from rdt_plan.placement import Placement
from rdt_plan.slices import Slice, contiguous_stride

__all__ = ["elements", "pack_slice", "piece_bytes", "place", "serve_chunk"]


def elements(offset: int, shape: Sequence[int], stride: Sequence[int]) -> Iterator[int]:
    """The element numbers of a strided region, in its order of iteration.

    >>> list(elements(1, (2, 2), (10, 3)))
    [1, 4, 11, 14]
    """
    for index in product(*map(range, shape)):
        yield offset + sum(i * step for i, step in zip(index, stride, strict=True))


def pack_slice(slice_: Slice, source: bytes) -> bytes:
    """The packed bytes of ``slice_``, read from the bytes of the whole source tensor."""
    item = item_bytes(slice_.dtype)
    return b"".join(
        source[element * item : (element + 1) * item]
        for element in elements(slice_.offset, slice_.shape, slice_.stride)
    )


def piece_bytes(meta: ParamMeta, rank: int, source: bytes) -> bytes:
    """What ``rank`` holds of ``meta``, as contiguous bytes, of the bytes of the whole tensor."""
    box = meta.box(rank)
    if box is None:
        return b""
    stride = contiguous_stride(meta.shape)
    offset = sum(map(mul, box.start, stride))
    return pack_slice(Slice(meta.name, meta.dtype, offset, box.shape, stride), source)


def place(placement: Placement, packed: bytes, destination: bytearray) -> None:
    """Copy a packed slice into the bytes of the whole destination tensor; dtypes must be equal."""
    if placement.dtype != placement.slice.dtype:
        raise ValueError(f"the reference copies bytes only, found a cast: {placement}")
    item = item_bytes(placement.dtype)
    for source, target in zip(
        elements(0, placement.shape, placement.source_stride),
        elements(placement.offset, placement.shape, placement.stride),
        strict=True,
    ):
        destination[target * item : (target + 1) * item] = packed[source * item :][:item]


def serve_chunk(chunk: ServeChunk, sources: Mapping[str, bytes]) -> bytes:
    """The packed bytes of ``chunk``, which is not direct, with zeros between slices."""
    packed = bytearray(chunk.num_bytes)
    for slice_, offset in zip(chunk.slices, chunk.offsets, strict=True):
        data = pack_slice(slice_, sources[slice_.name])
        packed[offset : offset + len(data)] = data
    return bytes(packed)
