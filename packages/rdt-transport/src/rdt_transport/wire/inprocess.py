"""A wire between threads of one process: memory is copied between real addresses.

It takes the same regions, handles and notifications as the nixl wire, so a session that works here
moves the same bytes there; it is public, for tests and for examples that need no NIXL.
"""

import ctypes
import itertools
import threading
import time
import uuid
from collections.abc import Sequence

import torch

from rdt_transport.direct_reads import merged
from rdt_transport.errors import PeerLostError, WireError, WireTimeoutError
from rdt_transport.wire._regions import RegisteredRanges, check_pairs, storage_range
from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    ReadHandle,
    RegionPair,
)

__all__ = ["InProcessFabric", "InProcessWire"]

_PAUSE_SECONDS = 0.001


class InProcessFabric:
    """What the wires of one test share; thread-safe.

    Args:
        read_polls: how many polls of its wire a posted read takes; 0 ends it inside ``post``, as
            the nixl wire does between processes of one host.
    """

    def __init__(self, read_polls: int = 0) -> None:
        self.read_polls = read_polls
        self.lock = threading.RLock()
        self._wires: dict[str, InProcessWire] = {}

    def join(self, wire: "InProcessWire") -> None:
        with self.lock:
            self._wires[wire.name] = wire

    def leave(self, name: str) -> None:
        """The wire of that name is gone, as when its process dies: nothing reaches it any more."""
        with self.lock:
            self._wires.pop(name, None)

    def has(self, name: str) -> bool:
        with self.lock:
            return name in self._wires

    def find(self, name: str) -> "InProcessWire":
        """Raises `PeerLostError` when no wire of that name is left."""
        with self.lock:
            wire = self._wires.get(name)
        if wire is None:
            raise PeerLostError(f"{name} is gone")
        return wire


class _InProcessRead:
    __slots__ = ("__weakref__", "notification", "pairs", "peer_name", "polls_left")

    def __init__(self, peer_name: str, pairs: Sequence[RegionPair]) -> None:
        self.peer_name = peer_name
        self.pairs = pairs
        self.polls_left = 0
        self.notification = b""


class InProcessWire:
    """A `Wire` to the other wires of one fabric; CPU memory only.

    Every wire may live on a thread of its own. Bytes are copied while the fabric is locked, so no
    peer closes, and gives its memory back, under a copy.
    """

    def __init__(self, fabric: InProcessFabric, role: str) -> None:
        self._name = f"{role}-{uuid.uuid4()}"
        self._fabric = fabric
        self._ranges = RegisteredRanges(self._name)
        self._storages: list[torch.UntypedStorage] = []
        self._addresses: dict[int, RegisteredRanges] = {}
        self._versions = itertools.count(1)
        self._peers: dict[str, RegisteredRanges] = {}
        self._handles: set[_InProcessRead] = set()
        self._in_flight: dict[_InProcessRead, ReadDone | ReadFailed | None] = {}  # until reported
        self._arrived: list[Notification] = []
        self._closed = False
        fabric.join(self)

    @property
    def name(self) -> str:
        return self._name

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._check_open()
        for buffer in buffers:
            storage = buffer.untyped_storage()
            known = storage_range(storage)
            if known.memory != "DRAM":
                raise WireError(f"{self._name} moves CPU memory, found {storage.device}")
            with self._fabric.lock:
                self._ranges.add(known)
            self._storages.append(storage)

    def address(self) -> PeerAddress:
        self._check_open()
        version = next(self._versions)
        with self._fabric.lock:
            self._addresses[version] = RegisteredRanges(self._name, tuple(self._ranges))
        return PeerAddress(self._name, version.to_bytes(8, "little"))

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        self._check_open()
        if peer.name == self._name:
            raise WireError(f"{self._name} cannot connect to itself; give each end its own wire")
        deadline = time.monotonic() + timeout_seconds
        while not self._fabric.has(peer.name):  # like nixl: silence is no proof of its end
            if time.monotonic() > deadline:
                raise WireTimeoutError(
                    f"{self._name} waited {timeout_seconds:g} s for its first read from {peer.name}"
                )
            time.sleep(_PAUSE_SECONDS)
        with self._fabric.lock:
            wire = self._fabric.find(peer.name)
            ranges = wire._addresses.get(int.from_bytes(peer.metadata, "little"))
        if ranges is None:
            raise WireError(f"metadata of {peer.name} is malformed")
        self._peers[peer.name] = ranges

    def disconnect(self, peer_name: str) -> None:
        self._ranges_of(peer_name)
        count = sum(read.peer_name == peer_name for read in self._handles)
        if count:
            raise WireError(f"{count} handles of {peer_name} are not released")
        del self._peers[peer_name]

    def prepare_read(self, peer_name: str, pairs: Sequence[RegionPair]) -> ReadHandle:
        theirs = self._ranges_of(peer_name)
        check_pairs(peer_name, pairs)
        read = _InProcessRead(peer_name, merged(pairs, self._ranges.holding, theirs.holding))
        self._handles.add(read)
        return read

    def release(self, handle: ReadHandle) -> None:
        read = self._own(handle)
        if read in self._in_flight:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be released")
        self._handles.discard(read)

    def post(self, handle: ReadHandle, notification: bytes) -> None:
        read = self._own(handle)
        if read in self._in_flight:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be posted again")
        if not notification:
            raise WireError(f"a read from {read.peer_name} needs a notification that is not empty")
        self._fabric.find(read.peer_name)
        read.polls_left = self._fabric.read_polls
        read.notification = notification
        self._in_flight[read] = self._end(read) if read.polls_left == 0 else None

    def _end(self, read: _InProcessRead) -> ReadDone | ReadFailed:
        with self._fabric.lock:
            try:
                peer = self._fabric.find(read.peer_name)
            except PeerLostError as error:
                return ReadFailed(read, str(error))
            for local, remote in read.pairs:
                ctypes.memmove(local.address, remote.address, local.num_bytes)
            peer._arrived.append(Notification(self._name, read.notification))
        return ReadDone(read)

    def notify(self, peer_name: str, message: bytes) -> None:
        self._ranges_of(peer_name)
        if not message:
            raise WireError(f"an empty message to {peer_name} cannot be sent")
        with self._fabric.lock:
            self._fabric.find(peer_name)._arrived.append(Notification(self._name, message))

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        self._check_open()
        ended: list[ReadDone | ReadFailed] = []
        for read, end in list(self._in_flight.items()):
            if end is None:
                read.polls_left -= 1
                end = self._end(read) if read.polls_left <= 0 else None
            if end is not None:
                ended.append(end)
                del self._in_flight[read]
        with self._fabric.lock:
            arrived, self._arrived = self._arrived, []
        return [*ended, *arrived]

    def close(self) -> None:
        with self._fabric.lock:
            self._closed = True
            self._fabric.leave(self._name)
            self._handles.clear()
            self._in_flight.clear()
            self._peers.clear()
            self._storages.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise WireError(f"{self._name} is closed")

    def _ranges_of(self, peer_name: str) -> RegisteredRanges:
        self._check_open()
        ranges = self._peers.get(peer_name)
        if ranges is None:
            raise WireError(
                f"{self._name} is not connected to {peer_name}, only to {sorted(self._peers)}"
            )
        return ranges

    def _own(self, handle: ReadHandle) -> _InProcessRead:
        """The handle as ours; raises `WireError` for a released or foreign one."""
        self._check_open()
        if not isinstance(handle, _InProcessRead) or handle not in self._handles:
            raise WireError(f"a read from {handle.peer_name} is released, or of another wire")
        return handle
