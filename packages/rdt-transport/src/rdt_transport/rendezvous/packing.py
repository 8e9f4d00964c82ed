"""Packing: manifests and chunk tables are full of names that are alike, and travel compressed.

A large model's take a twentieth of their bytes, and whoever only passes them on never unpacks them.
"""

import zlib

from rdt_plan import MAX_MESSAGE_BYTES
from rdt_transport.errors import RendezvousProtocolError

__all__ = ["pack", "unpack"]

_LEVEL = 1  # higher ones gain a tenth, and take several times as long


def pack(data: bytes) -> bytes:
    """``data`` as zlib compresses it (RFC 1950)."""
    return zlib.compress(data, _LEVEL)


def unpack(packed: bytes) -> bytes:
    """What was packed; raises `RendezvousProtocolError` if that was not done, or is too large."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(packed, MAX_MESSAGE_BYTES)
    except zlib.error as error:
        raise RendezvousProtocolError(f"expected a packed message: {error}") from error
    if not reader.eof or reader.unused_data:
        raise RendezvousProtocolError(
            f"expected one whole packed message of at most {MAX_MESSAGE_BYTES} bytes"
        )
    return data
