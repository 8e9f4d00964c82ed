"""The wire: one-sided reads between registered buffers, and small notifications.

A wire belongs to one thread from creation to close (the progress thread); no method is thread-safe.
Nothing here blocks for longer than one poll, except `connect`, which has a deadline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "Notification",
    "PeerAddress",
    "ReadDone",
    "ReadFailed",
    "ReadHandle",
    "Region",
    "RegionPair",
    "Wire",
]


@dataclass(frozen=True, slots=True)
class Region:
    """A byte range of registered memory: absolute address, length, and device ordinal."""

    address: int
    num_bytes: int
    device: int = 0


RegionPair = tuple[Region, Region]
"""Where bytes land here, and where they lie in the peer's memory; of equal lengths."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """How to reach a peer: its unique incarnation name and its wire's opaque metadata."""

    name: str
    metadata: bytes


class ReadHandle(Protocol):
    """A prepared read; posted once per epoch, reusable after it completed."""

    @property
    def peer_name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ReadDone:
    """All bytes of ``handle`` have landed."""

    handle: ReadHandle


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """``handle`` ended with an error; its destination bytes are undefined."""

    handle: ReadHandle
    reason: str


@dataclass(frozen=True, slots=True)
class Notification:
    """A message of a peer, in the order that peer sent its messages."""

    sender: str
    message: bytes


class Wire(Protocol):
    """The seam every wire fills.

    `rdt_transport.testing.wire_contract.check_wire` is its contract.
    """

    @property
    def name(self) -> str:
        """Unique per incarnation; what peers see as `Notification.sender`."""
        ...

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        """Register each buffer's whole storage, once, and keep it alive.

        Of a GPU's memory the whole allocation is registered that the storage was cut from.
        """
        ...

    def address(self) -> PeerAddress:
        """Where peers reach this wire; covers what is registered when it is called."""
        ...

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        """Learn (or learn more of) a peer and warm the path up; raises `WireTimeoutError`."""
        ...

    def disconnect(self, peer_name: str) -> None:
        """Forget a peer; its handles must have been released."""
        ...

    def prepare_read(self, peer_name: str, pairs: Sequence[RegionPair]) -> ReadHandle:
        """A handle that reads each remote region of that peer into its local one, in any order.

        At least one pair; lengths are equal within a pair, and above 0. The local regions must not
        overlap, and each side's lie in one kind of memory.
        """
        ...

    def release(self, handle: ReadHandle) -> None:
        """Give a handle back; raises `WireError` while it is in flight."""
        ...

    def post(self, handle: ReadHandle, notification: bytes) -> None:
        """Start the read. The peer gets ``notification`` when the bytes have been read.

        The handle is in flight until `poll` reports its end: until then it can be neither posted
        again nor released (`WireError`). ``notification`` must not be empty.
        """
        ...

    def notify(self, peer_name: str, message: bytes) -> None:
        """Send a small message to a connected peer; raises `WireError` when it is gone."""
        ...

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        """What happened since the last poll; returns at once."""
        ...

    def close(self) -> None:
        """Release handles, drop peers, deregister, drop the agent, in this order; idempotent."""
        ...
