"""Checksums of slices: what a producer's bytes are, told apart from what a consumer got.

A checksum is the first 8 bytes of the keyed BLAKE2b of a region's bytes, dense and in its
iteration order, as 16 lower-case hexadecimal digits. The key is drawn for one sync: nobody can
answer with what was right in another.
"""

import ctypes
import hashlib
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from rdt_plan import ChunkTable, ServeChunk, Slice
from rdt_plan.slices import last_element
from rdt_transport.pack import torch_dtype

__all__ = [
    "CHECKSUM_CHARS",
    "MAX_KEY_BYTES",
    "chunk_checksums",
    "region_checksum",
    "split_checksums",
    "sync_key",
]

CHECKSUM_CHARS = 16
MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
NUM_THREADS = 8

# A copy of the bits, whatever the dtype means by them: a copy of bools would normalise them.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def sync_key() -> str:
    """A fresh key: 32 bytes as hexadecimal digits."""
    return secrets.token_hex(32)


def region_checksum(region: torch.Tensor, key: bytes) -> str:
    """Of a tensor's elements; of any device, whose current stream is waited for."""
    dense = region.detach().view(_BITS[region.dtype.itemsize]).contiguous().cpu()
    num_bytes = dense.numel() * dense.dtype.itemsize
    data = (ctypes.c_char * num_bytes).from_address(dense.data_ptr()) if num_bytes else b""
    return hashlib.blake2b(data, digest_size=CHECKSUM_CHARS // 2, key=key).hexdigest()


def chunk_checksums(
    table: ChunkTable, key: bytes, source_of: Callable[[str], torch.Tensor]
) -> Iterable[str]:
    """What each chunk of ``table`` brings: the checksums of its slices, one after the other.

    ``source_of`` gives what the table's owner holds of a name, contiguous; it is called on several
    threads. Yields by seq, each as soon as it is known.
    """

    def checksums(chunk: ServeChunk) -> str:
        return "".join(
            region_checksum(_slice_of(source_of(each.name), each), key) for each in chunk.slices
        )

    with ThreadPoolExecutor(NUM_THREADS, "rdt-checksum") as pool:
        yield from pool.map(checksums, table.chunks)


def split_checksums(text: str) -> list[str]:
    """The checksums that follow one another in ``text``."""
    return [text[at : at + CHECKSUM_CHARS] for at in range(0, len(text), CHECKSUM_CHARS)]


def _slice_of(source: torch.Tensor, slice_: Slice) -> torch.Tensor:
    """The slice's elements, in its strides."""
    dtype = torch_dtype(slice_.dtype)
    stop = last_element(slice_.offset, slice_.shape, slice_.stride) + 1
    run = source.reshape(-1).view(torch.uint8)[
        slice_.offset * dtype.itemsize : stop * dtype.itemsize
    ]
    if run.data_ptr() % dtype.itemsize or run.storage_offset() % dtype.itemsize:
        run = run.clone()
    return run.view(dtype).as_strided(slice_.shape, slice_.stride)
