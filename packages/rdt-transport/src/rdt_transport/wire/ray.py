"""The ray wire: reads over Ray Direct Transport, and messages through actors.

For clusters whose tensor transports Ray knows and NIXL does not; the nixl wire is faster wherever
both work. A wire that serves has an actor beside it, its office, because neither a driver nor a
busy actor can be called. Peers post their messages there and ask there, by one open call each, for
those that are for them. A prepared read is an object of the peer's, with its regions as tensors:
asked for once, got again by every post. Ray's calls block, so a thread of the wire's makes them.
"""

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from rdt_transport.errors import PeerLostError, WireError, WireTimeoutError
from rdt_transport.wire._metadata import PROOF_BYTES
from rdt_transport.wire._nixl_peer import ProofPage
from rdt_transport.wire._ray_cluster import attach, detach
from rdt_transport.wire._ray_direct import RayDirect, Shared
from rdt_transport.wire._ray_jobs import Jobs
from rdt_transport.wire._ray_line import OfficeLine
from rdt_transport.wire._ray_memory import PinnedMemory
from rdt_transport.wire._ray_metadata import RayMetadata
from rdt_transport.wire._ray_office import Letter
from rdt_transport.wire._ray_offices import close_office, find_office, open_office
from rdt_transport.wire._ray_peer import RayPeer, RayRead
from rdt_transport.wire._ray_reads import Reads
from rdt_transport.wire._ray_served import ServedObjects
from rdt_transport.wire._regions import RegisteredRanges, check_pairs
from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    ReadHandle,
    RegionPair,
)

__all__ = ["RayWire"]

_logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 5.0
_undrained: list[object] = []
"""Memory a read may still write to after its wire was closed: never given back."""


class RayWire:
    """A `Wire` over Ray Direct Transport; see `rdt_transport.wire.base` for what methods promise.

    Args:
        role: what this wire is for; its name is ``<role>-<uuid>``, unique for this incarnation.
        serves: whether it can be read. One that only reads has no office: it takes its messages
            from the offices of those it has connected to, and nobody but they can meet it.
        transport: Ray's name of the tensor transport, a one-sided one.
        address: of the cluster to attach to ("auto": this node's) where the process is not
            attached; None: it is. The last wire that closes leaves a cluster that one attached to.

    Raises:
        RayMissingError: Ray is absent, too old, or not initialised.
        WireError: the office does not come up, or the transport does not work.
    """

    def __init__(
        self,
        role: str,
        *,
        serves: bool = True,
        transport: str = "NIXL",
        address: str | None = None,
    ) -> None:
        self._name = f"{role}-{uuid.uuid4()}"
        self._peers: dict[str, RayPeer] = {}
        self._lines: dict[str, OfficeLine] = {}  # by whose office; of former peers too
        self._arrived: list[Notification] = []
        self._closed = False
        self._served: ServedObjects | None = None
        self._proof: Shared | None = None
        self._office: Any = None
        self._page = ProofPage(self._name)
        self._ray = attach(address)
        try:
            self._direct = RayDirect(self._ray, transport)
        except BaseException:
            detach(self._ray)
            raise
        self._memory = PinnedMemory(self._name, self._direct)
        self._jobs = Jobs(f"rdt-ray-{role}")
        self._reads = Reads(self._direct, self._memory, self._jobs, self._lines)
        try:
            self._memory.register([self._page.buffer])
            if serves:
                self._proof = self._direct.share([self._page.buffer[:PROOF_BYTES]])
                self._office = open_office(self._ray, self._name, self._proof[1])
                line = self._lines[self._name] = OfficeLine(self._office, self._name)
                self._served = ServedObjects(self._direct, self._memory, self._jobs, line)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._check_open()
        self._memory.register(buffers)

    def address(self) -> PeerAddress:
        self._check_open()
        serves = self._served is not None
        metadata = RayMetadata(self._direct.transport, serves, tuple(self._memory.ranges))
        return PeerAddress(self._name, metadata.encode())

    def connect(self, peer: PeerAddress, timeout_seconds: float) -> None:
        self._check_open()
        if peer.name == self._name:
            raise WireError(f"{self._name} cannot connect to itself; give each end its own wire")
        metadata = RayMetadata.decode(peer.name, peer.metadata)
        if metadata.transport != self._direct.transport:
            raise WireError(
                f"{peer.name} uses Ray's transport {metadata.transport}, {self._name} uses "
                f"{self._direct.transport}; give both the same"
            )
        if not metadata.serves and self._served is None:
            raise WireError(f"{self._name} and {peer.name} only read; one of two must serve")
        ranges = RegisteredRanges(peer.name, metadata.ranges)
        known = self._peers.setdefault(peer.name, RayPeer(peer.name, metadata.serves))
        if metadata.serves:
            self._make_contact(known, timeout_seconds)
        known.ranges = ranges

    def _make_contact(self, peer: RayPeer, timeout_seconds: float) -> None:
        """Find the peer's office and read its proof: sets the path up, and shows that it works."""
        if peer.contact is None:
            landing = self._page.landing()
            job = partial(find_office, self._ray, self._direct, peer.name, landing)
            peer.contact = self._jobs.run(job)
        if not wait([peer.contact], timeout_seconds).done:  # connecting again goes on with it
            raise WireTimeoutError(
                f"{self._name} waited {timeout_seconds:g} s for its first read from {peer.name}; "
                "is that process alive, and reachable?"
            )
        contact, peer.contact = peer.contact, None
        if (error := contact.exception()) is not None:
            if peer.ranges is None:
                del self._peers[peer.name]
            raise error
        line = self._lines.get(peer.name)
        if line is None or line.lost is not None:
            line = self._lines[peer.name] = OfficeLine(contact.result(), self._name)
        line.takes = True

    def disconnect(self, peer_name: str) -> None:
        peer = self._peer(peer_name, connected=False)
        if peer.reads:
            raise WireError(f"{len(peer.reads)} handles of {peer_name} are not released")
        del self._peers[peer_name]
        if (line := self._lines.get(peer_name)) is not None:
            line.takes = False
            line.post(self._name, "leave")
        if self._served is not None:
            self._served.leave(peer_name)
            self._lines[self._name].post(peer_name, "leave")

    def prepare_read(self, peer_name: str, pairs: Sequence[RegionPair]) -> ReadHandle:
        peer = self._peer(peer_name)
        check_pairs(peer_name, pairs)
        if not peer.serves:
            raise WireError(f"{peer_name} only reads; make its wire with serves=True to read it")
        assert peer.ranges is not None, "a connected peer has published its ranges"
        return self._reads.prepare(peer, peer.ranges, pairs)

    def release(self, handle: ReadHandle) -> None:
        read = self._own(handle)
        if read in self._reads:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be released")
        del self._peers[read.peer_name].reads[read.number]
        self._reads.release(read)

    def post(self, handle: ReadHandle, notification: bytes) -> None:
        read = self._own(handle)
        if read in self._reads:
            raise WireError(f"a read from {read.peer_name} is in flight and cannot be posted again")
        if not notification:
            raise WireError(f"a read from {read.peer_name} needs a notification that is not empty")
        self._line(read.peer_name)
        self._reads.post(read, notification)

    def notify(self, peer_name: str, message: bytes) -> None:
        line = self._line(peer_name if self._peer(peer_name).serves else self._name)
        if not message:
            raise WireError(f"an empty message to {peer_name} cannot be sent")
        line.post(peer_name, "note", message)

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        self._check_open()
        self._jobs.poll()
        for name, line in self._lines.items():
            for letter in line.poll():
                self._receive(letter)
            if line.lost is not None:
                self._lose(name, line.lost)
        arrived, self._arrived = self._arrived, []
        return [*self._reads.ended(), *arrived]

    def _receive(self, letter: Letter) -> None:
        _, sender, kind, content = letter
        match kind:
            case "note":
                self._arrived.append(Notification(sender, content))
                if self._served is not None:
                    self._served.was_told()
            case "ask" if self._served is not None:
                self._served.ask(sender, *content)
            case "free" if self._served is not None:
                self._served.free(sender, content)
            case "object" | "refused":
                number, answer = content
                peer = self._peers.get(sender)
                if peer is None or (read := peer.reads.get(number)) is None:
                    return  # released meanwhile
                if kind == "object":
                    self._reads.found(read, answer[0])
                else:
                    self._reads.refused(read, answer)
            case _:
                _logger.debug("%s: dropped a letter of %s: %s", self._name, sender, kind)

    def _lose(self, owner: str, reason: str) -> None:
        """The office of ``owner`` is gone."""
        if owner == self._name:
            raise WireError(f"the office of {owner} is gone: {reason}; make a new wire")
        if (peer := self._peers.get(owner)) is not None:
            self._reads.lose(peer, reason)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._office is not None:
            close_office(self._ray, self._office)  # from now on no read can end well
        if self._served is not None:
            self._served.clear()
        self._proof = None
        drained = self._jobs.close(_DRAIN_SECONDS)
        quiet = drained and self._reads.late is None
        if not quiet:
            _undrained.append(self._memory)
        with suppress(Exception):  # Ray may be gone before us
            for name, line in self._lines.items():
                if name != self._name:
                    line.hang_up()
        with suppress(Exception):
            if quiet:
                self._memory.release()
        self._lines.clear()
        self._peers.clear()
        detach(self._ray)

    def _check_open(self) -> None:
        if self._closed:
            raise WireError(f"{self._name} is closed")

    def _line(self, owner: str) -> OfficeLine:
        """The line to that office; raises `PeerLostError` when it is gone."""
        line = self._lines[owner]
        if line.lost is not None:
            raise PeerLostError(f"the office of {owner} is gone: {line.lost}")
        return line

    def _peer(self, peer_name: str, *, connected: bool = True) -> RayPeer:
        self._check_open()
        peer = self._peers.get(peer_name)
        if peer is None or (connected and peer.ranges is None):
            raise WireError(
                f"{self._name} is not connected to {peer_name}, only to {sorted(self._peers)}"
            )
        return peer

    def _own(self, handle: ReadHandle) -> RayRead:
        """The handle as ours; raises `WireError` for a released or foreign one."""
        peer = self._peer(handle.peer_name)
        if not isinstance(handle, RayRead) or peer.reads.get(handle.number) is not handle:
            raise WireError(f"a read from {handle.peer_name} is released, or of another wire")
        return handle
