"""What the nixl wire publishes beside NIXL's own metadata: its ranges, and a page that proves it.

Layout, little endian: magic (4 bytes), SHA-256 of all that follows (32 bytes); number of ranges
(u32), address of the page (u64); each range as address (u64), bytes (u64), device (u32), memory
(u32: 0 DRAM, 1 VRAM); NIXL's metadata. The digest finds damage: NIXL may not survive a metadata of
its own that was altered.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from rdt_transport.agent import MemoryKind
from rdt_transport.errors import WireError
from rdt_transport.wire._regions import RegisteredRange

__all__ = ["PROOF_BYTES", "WireMetadata", "name_proof"]

PROOF_BYTES = 32
"""Length of the page every peer reads first."""

_MAGIC = b"rdt1"
_SEAL = struct.Struct("<4s32s")
_HEADER = struct.Struct("<IQ")
_RANGE = struct.Struct("<QQII")
_KINDS: tuple[MemoryKind, ...] = ("DRAM", "VRAM")


def name_proof(name: str) -> bytes:
    """What the page of the wire called ``name`` contains (`PROOF_BYTES` bytes)."""
    return hashlib.sha256(name.encode()).digest()


@dataclass(frozen=True, slots=True)
class WireMetadata:
    """A peer's page address, its registered ranges, and NIXL's metadata of its agent."""

    page_address: int
    ranges: tuple[RegisteredRange, ...]
    agent: bytes

    def encode(self) -> bytes:
        parts = [_HEADER.pack(len(self.ranges), self.page_address)]
        parts += [
            _RANGE.pack(known.address, known.num_bytes, known.device, _KINDS.index(known.memory))
            for known in self.ranges
        ]
        body = b"".join([*parts, self.agent])
        return _SEAL.pack(_MAGIC, hashlib.sha256(body).digest()) + body

    @classmethod
    def decode(cls, peer_name: str, data: bytes) -> "WireMetadata":
        """Raises `WireError`, naming the peer, on anything that is not ours."""
        magic, seal = data[:4], data[4 : _SEAL.size]
        if magic != _MAGIC:
            raise WireError(
                f"metadata of {peer_name} is not of this wire: expected {_MAGIC!r}, found "
                f"{magic!r}; install one version of rdt-transport on both ends"
            )
        body = data[_SEAL.size :]
        if hashlib.sha256(body).digest() != seal:
            raise WireError(f"metadata of {peer_name} is malformed: its SHA-256 does not match")
        try:
            num_ranges, page_address = _HEADER.unpack_from(body)
            end = _HEADER.size + num_ranges * _RANGE.size
            rows: Iterable[tuple[int, int, int, int]] = _RANGE.iter_unpack(body[_HEADER.size : end])
            ranges = tuple(RegisteredRange(a, n, d, _KINDS[kind]) for a, n, d, kind in rows)
        except (struct.error, IndexError) as error:
            raise WireError(f"metadata of {peer_name} is malformed: {error}") from error
        if len(ranges) != num_ranges:
            raise WireError(
                f"metadata of {peer_name} is malformed: {len(ranges)} of {num_ranges} ranges"
            )
        return cls(page_address, ranges, body[end:])
