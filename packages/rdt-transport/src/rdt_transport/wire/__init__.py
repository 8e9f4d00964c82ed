"""Wires move bytes between registered buffers; `base` is the seam, each other file fills it."""

from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    ReadHandle,
    Region,
    RegionPair,
    Wire,
)

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
