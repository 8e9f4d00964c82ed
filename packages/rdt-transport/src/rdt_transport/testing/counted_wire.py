"""A wire that counts the messages it carries."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    ReadHandle,
    RegionPair,
    Wire,
)

__all__ = ["CountedWire"]


@dataclass
class CountedWire:
    """Passes everything on to ``wire``.

    Attributes:
        num_sent: notifications, those that ride on reads included.
        num_received: notifications that polls have given.
    """

    wire: Wire
    num_sent: int = 0
    num_received: int = 0

    @property
    def name(self) -> str:
        return self.wire.name

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self.wire.register(buffers)

    def address(self) -> PeerAddress:
        return self.wire.address()

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        self.wire.connect(peer, timeout_seconds)

    def disconnect(self, peer_name: str) -> None:
        self.wire.disconnect(peer_name)

    def prepare_read(self, peer_name: str, pairs: Sequence[RegionPair]) -> ReadHandle:
        return self.wire.prepare_read(peer_name, pairs)

    def release(self, handle: ReadHandle) -> None:
        self.wire.release(handle)

    def post(self, handle: ReadHandle, notification: bytes) -> None:
        self.num_sent += 1
        self.wire.post(handle, notification)

    def notify(self, peer_name: str, message: bytes) -> None:
        self.num_sent += 1
        self.wire.notify(peer_name, message)

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        events = self.wire.poll()
        self.num_received += sum(isinstance(event, Notification) for event in events)
        return events

    def close(self) -> None:
        self.wire.close()
