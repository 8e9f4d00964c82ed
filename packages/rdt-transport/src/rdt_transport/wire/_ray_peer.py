"""What a ray wire holds of each peer, and of each prepared read."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rdt_transport.wire._regions import RegisteredRanges

__all__ = ["RayPeer", "RayRead"]


class RayRead:
    """A prepared read: where it lands, and the object that the peer makes of its regions.

    ``ref`` is None until the peer has answered; ``failed`` says why there will be none.
    """

    __slots__ = ("__weakref__", "failed", "notification", "number", "peer_name", "ref", "targets")

    def __init__(self, peer_name: str, number: int, targets: Sequence[torch.Tensor]) -> None:
        self.peer_name = peer_name
        self.number = number
        self.targets = targets  # Ray refers to them weakly
        self.ref: Any = None
        self.failed: str | None = None
        self.notification = b""


class RayPeer:
    """A peer by name: its ranges (None until connected), its reads by number, and the first contact
    with its office, while that lasts."""

    __slots__ = ("contact", "name", "ranges", "reads", "serves")

    def __init__(self, name: str, serves: bool) -> None:
        self.name = name
        self.serves = serves
        self.ranges: RegisteredRanges | None = None
        self.reads: dict[int, RayRead] = {}
        self.contact: Future[Any] | None = None
