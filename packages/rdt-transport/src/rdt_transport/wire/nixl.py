"""The nixl wire: prepared one-sided reads and notifications of one NIXL agent.

Only its own thread progresses this wire, so both ends must poll. First contact with a peer and
every byte over TCP wait for polls of the peer. Between processes of one host a read of CPU memory
is a copy made inside `NixlWire.post`; yet NIXL flushes the connection after every read, and the
flush waits for a poll of the peer that acknowledges the notification sent before. So a read may
take as long as a peer sleeps between its polls, and a busy peer must not sleep long.
A read that posting threads share does not wait so: they have connections of their own.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Generator, Sequence

import torch

from rdt_transport.agent import SPLIT_REGIONS, MemoryKind, NixlAgent
from rdt_transport.direct_reads import merged
from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.wire._metadata import WireMetadata, name_proof
from rdt_transport.wire._nixl_peer import NixlPeer, NixlRead, ProofPage
from rdt_transport.wire._regions import (
    RegisteredRange,
    RegisteredRanges,
    check_pairs,
    spans_of,
    storage_range,
)
from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    ReadHandle,
    RegionPair,
)

__all__ = ["NixlWire"]

_logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.0005
_DRAIN_SECONDS = 1.0
_SETTLE_POLLS = 5
_undrained: list[object] = []
"""Memory a read may still write to after its wire was closed: never given back."""


class NixlWire:
    """A `Wire` over one NIXL agent; see `rdt_transport.wire.base` for what each method promises.

    Args:
        role: what this wire is for; its name is ``<role>-<uuid>``, unique for this incarnation.
        backend: the NIXL plugin that moves the bytes.
        num_threads: that post reads of many regions together: see `NixlAgent`.

    Raises:
        NixlMissingError: NIXL is not installed, or too old.
    """

    def __init__(self, role: str, backend: str = "UCX", num_threads: int = 0) -> None:
        self._name = f"{role}-{uuid.uuid4()}"
        self._agent = NixlAgent(self._name, backend, num_threads)
        self._ranges = RegisteredRanges(self._name)
        self._registrations: list[object] = []
        self._storages: list[torch.UntypedStorage] = []
        self._peers: dict[str, NixlPeer] = {}
        self._in_flight: dict[NixlRead, ReadDone | ReadFailed | None] = {}  # until reported
        self._arrived: list[Notification] = []
        self._closed = False
        self._page = ProofPage(self._name)
        self._first_parts = SPLIT_REGIONS if num_threads else 1  # each thread has its own path
        self.register([self._page.buffer])

    @property
    def name(self) -> str:
        return self._name

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._check_open()
        new: dict[MemoryKind, list[RegisteredRange]] = {}
        try:
            for buffer in buffers:
                known = storage_range(buffer.untyped_storage())
                if self._ranges.add(known):
                    new.setdefault(known.memory, []).append(known)
            for memory, ranges in new.items():
                spans = [(known.address, known.num_bytes, known.device) for known in ranges]
                self._registrations.append(self._agent.register(spans, memory))
        except WireError:
            for ranges in new.values():
                for known in ranges:
                    self._ranges.discard(known)
            raise
        self._storages += [buffer.untyped_storage() for buffer in buffers]

    def address(self) -> PeerAddress:
        self._check_open()
        page_address = self._page.buffer.data_ptr()
        metadata = WireMetadata(page_address, tuple(self._ranges), self._agent.metadata())
        return PeerAddress(self._name, metadata.encode())

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        self._check_open()
        if peer.name == self._name:
            raise WireError(f"{self._name} cannot connect to itself; give each end its own wire")
        metadata = WireMetadata.decode(peer.name, peer.metadata)
        found = self._agent.add_peer(peer.name, metadata.agent)
        if found != peer.name:
            self._agent.remove_peer(found)
            raise WireError(f"the address of {peer.name} holds the metadata of {found}")
        ranges = RegisteredRanges(peer.name, metadata.ranges)
        known = self._peers.setdefault(peer.name, NixlPeer(peer.name, ranges))
        known.ranges = ranges
        try:
            self._make_contact(known, metadata.page_address, timeout_seconds)
        except WireTimeoutError:
            raise  # its first read is in flight; connecting again goes on with it
        except WireError:
            self._forget_first_read(known)
            if not known.connected:
                self.disconnect(peer.name)
            raise
        known.connected = True

    def _make_contact(self, peer: NixlPeer, page_address: int, timeout_seconds: float) -> None:
        """Read the peer's proof: sets the path up, and shows that it leads to that peer."""
        deadline = time.monotonic() + timeout_seconds
        ended = False
        if peer.first_read is None:
            landing = self._page.landing()
            proof = ProofPage.pairs(landing.data_ptr(), page_address, self._first_parts)
            read = self._prepare(peer, proof)
            peer.first_read = (read, landing)
            ended = self._agent.post(peer.name, read.transfer, b"")
        read, landing = peer.first_read
        while not (ended or self._agent.finished(peer.name, read.transfer)):
            if time.monotonic() > deadline:
                raise WireTimeoutError(
                    f"{self._name} waited {timeout_seconds:g} s for its first read from "
                    f"{peer.name}; is that process alive, polling its wire, and reachable?"
                )
            self._receive()
            time.sleep(_PAUSE_SECONDS)
        self._forget_first_read(peer)
        if bytes(landing.tolist()) != name_proof(peer.name):
            raise WireError(
                f"reading from {peer.name} reached other memory; do both processes see the same "
                "host (process ids and network of their containers)?"
            )

    def _forget_first_read(self, peer: NixlPeer) -> None:
        if peer.first_read is not None:
            read, _ = peer.first_read
            peer.first_read = None
            self._give_back(read)

    def disconnect(self, peer_name: str) -> None:
        peer = self._peer(peer_name, connected=False)
        if peer.handles:
            raise WireError(f"{len(peer.handles)} handles of {peer_name} are not released")
        del self._peers[peer_name]
        self._forget_first_read(peer)
        self._agent.remove_peer(peer_name)
        self._receive()  # lets the connection finish closing, should the peer be met again

    def prepare_read(self, peer_name: str, pairs: Sequence[RegionPair]) -> ReadHandle:
        peer = self._peer(peer_name)
        check_pairs(peer_name, pairs)
        read = self._prepare(peer, merged(pairs, self._ranges.holding, peer.ranges.holding))
        peer.handles.add(read)
        return read

    def _prepare(self, peer: NixlPeer, pairs: Sequence[RegionPair]) -> NixlRead:
        locals_, remotes = zip(*pairs, strict=True)
        mine = self._agent.prepare(None, spans_of(locals_), self._ranges.memory_of(locals_))
        theirs = peer.ranges.memory_of(remotes)
        other = self._agent.prepare(peer.name, spans_of(remotes), theirs)
        transfer = self._agent.make_read(peer.name, mine, other, len(pairs))
        return NixlRead(peer.name, transfer, mine, other, len(pairs))

    def release(self, handle: ReadHandle) -> None:
        read = self._own(handle)
        if read in self._in_flight:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be released")
        self._peers[read.peer_name].handles.discard(read)
        self._give_back(read)

    def _give_back(self, read: NixlRead) -> None:
        prepared = (read.transfer, read.local, read.remote)
        read.transfer = read.local = read.remote = None  # each of them holds NIXL's agent
        for each in prepared:
            self._agent.release(each)

    def post(self, handle: ReadHandle, notification: bytes) -> None:
        read = self._own(handle)
        if read in self._in_flight:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be posted again")
        if not notification:
            raise WireError(f"a read from {read.peer_name} needs a notification that is not empty")
        finished = self._agent.post(read.peer_name, read.transfer, notification)
        self._in_flight[read] = ReadDone(read) if finished else None

    def notify(self, peer_name: str, message: bytes) -> None:
        self._peer(peer_name)
        if not message:
            raise WireError(f"an empty message to {peer_name} cannot be sent")
        self._agent.notify(peer_name, message)

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        self._check_open()
        self._receive()
        self._check_reads()
        ended = {read: end for read, end in self._in_flight.items() if end is not None}
        for read in ended:
            del self._in_flight[read]
        arrived, self._arrived = self._arrived, []
        return [*ended.values(), *arrived]

    def _receive(self) -> None:
        self._arrived += [Notification(*arrived) for arrived in self._agent.notifications()]

    def _check_reads(self) -> bool:
        """Ask after the reads that have not ended; True when all have."""
        for read, end in self._in_flight.items():
            if end is None:
                try:
                    if self._agent.finished(read.peer_name, read.transfer):
                        self._in_flight[read] = ReadDone(read)
                except WireError as error:
                    self._in_flight[read] = ReadFailed(read, str(error))
        return None not in self._in_flight.values()

    def close(self) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not (drained := self._check_reads()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        self._closed = True
        if not drained or any(peer.first_read for peer in self._peers.values()):
            _undrained.extend([self._page, self._storages])
        # UCX aborts the process unless everything is given back, in this order, and connections
        # have had some polls to finish closing before the agent goes.
        for peer in self._peers.values():
            for read in peer.handles:
                with self._past_errors():
                    self._give_back(read)
            with self._past_errors():
                self._forget_first_read(peer)
        for name in self._peers:
            with self._past_errors():
                self._agent.remove_peer(name)
        for _ in range(_SETTLE_POLLS):
            with self._past_errors():
                self._receive()
            time.sleep(_PAUSE_SECONDS)
        for registration in self._registrations:
            with self._past_errors():
                self._agent.deregister(registration)
        self._peers.clear()
        self._in_flight.clear()
        self._registrations.clear()
        self._storages = []
        self._agent.close()

    @contextlib.contextmanager
    def _past_errors(self) -> Generator[None]:
        """Closing goes on past an error: a peer that died cannot be taken leave of."""
        try:
            yield
        except WireError as error:
            _logger.warning("while closing %s: %s", self._name, error)

    def _check_open(self) -> None:
        if self._closed:
            raise WireError(f"{self._name} is closed")

    def _peer(self, peer_name: str, *, connected: bool = True) -> NixlPeer:
        self._check_open()
        peer = self._peers.get(peer_name)
        if peer is None or (connected and not peer.connected):
            raise WireError(
                f"{self._name} is not connected to {peer_name}, only to {sorted(self._peers)}"
            )
        return peer

    def _own(self, handle: ReadHandle) -> NixlRead:
        """The handle as ours; raises `WireError` for a released or foreign one."""
        peer = self._peer(handle.peer_name)
        if not isinstance(handle, NixlRead) or handle not in peer.handles:
            raise WireError(f"a read from {handle.peer_name} is released, or of another wire")
        return handle
