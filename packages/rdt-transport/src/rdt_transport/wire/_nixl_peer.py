"""What a nixl wire holds of each peer, and the page that a first contact reads."""

from typing import Any

import torch

from rdt_transport.wire._metadata import PROOF_BYTES, name_proof
from rdt_transport.wire._regions import RegisteredRanges
from rdt_transport.wire.base import Region, RegionPair

__all__ = ["NixlPeer", "NixlRead", "ProofPage"]

_NUM_LANDINGS = 127


class NixlRead:
    """A prepared read: NIXL's transfer handle and its two lists of ``num_regions`` descriptors."""

    __slots__ = ("__weakref__", "local", "num_regions", "peer_name", "remote", "transfer")

    def __init__(
        self, peer_name: str, transfer: Any, local: Any, remote: Any, num_regions: int
    ) -> None:
        self.peer_name = peer_name
        self.num_regions = num_regions
        self.transfer = transfer
        self.local = local
        self.remote = remote


class NixlPeer:
    """A peer's ranges, its live handles, and its first read and where that lands, until it ended.

    ``connected`` is True once a first read has ended.
    """

    __slots__ = ("connected", "first_read", "handles", "name", "ranges")

    def __init__(self, name: str, ranges: RegisteredRanges) -> None:
        self.name = name
        self.ranges = ranges
        self.handles: set[NixlRead] = set()
        self.first_read: tuple[NixlRead, torch.Tensor] | None = None
        self.connected = False


class ProofPage:
    """Registered memory that starts with our proof, which peers read; theirs land behind it."""

    def __init__(self, name: str) -> None:
        self.buffer = torch.zeros((1 + _NUM_LANDINGS) * PROOF_BYTES, dtype=torch.uint8)
        self.buffer[:PROOF_BYTES] = torch.tensor(list(name_proof(name)), dtype=torch.uint8)
        self._num_taken = 0

    def landing(self) -> torch.Tensor:
        """`PROOF_BYTES` bytes for one first read; taken again only after many others."""
        place = (1 + self._num_taken % _NUM_LANDINGS) * PROOF_BYTES
        self._num_taken += 1
        return self.buffer[place : place + PROOF_BYTES]

    @staticmethod
    def pairs(here: int, there: int, num_parts: int) -> list[RegionPair]:
        """A read of the peer's page at ``there`` into the landing at ``here``, in that many parts.

        Last part first: NIXL makes one of regions that follow each other.
        """
        num_bytes = PROOF_BYTES // num_parts
        starts = reversed(range(0, PROOF_BYTES, num_bytes))
        return [(Region(here + at, num_bytes), Region(there + at, num_bytes)) for at in starts]
