"""The reads of a ray wire: each an object of its peer's, asked for once and got by every post."""

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rdt_transport.direct_reads import merged
from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.wire._ray_direct import READ_SECONDS, RayDirect
from rdt_transport.wire._ray_jobs import Jobs
from rdt_transport.wire._ray_line import OfficeLine
from rdt_transport.wire._ray_memory import PinnedMemory
from rdt_transport.wire._ray_peer import RayPeer, RayRead
from rdt_transport.wire._regions import RegisteredRanges
from rdt_transport.wire.base import ReadDone, ReadFailed, RegionPair

__all__ = ["Reads"]

_logger = logging.getLogger(__name__)


class Reads:
    """Prepared reads, from asking for their objects to their ends; only on the wire's thread.

    Args:
        lines: to the offices of the peers, by name; the wire's own, which it keeps up to date.

    Attributes:
        late: which read Ray gave up, so that it stays in flight; None: none.
    """

    def __init__(
        self, direct: RayDirect, memory: PinnedMemory, jobs: Jobs, lines: dict[str, OfficeLine]
    ) -> None:
        self.late: str | None = None
        self._direct = direct
        self._memory = memory
        self._jobs = jobs
        self._lines = lines
        self._numbers = itertools.count(1)
        self._in_flight: dict[RayRead, ReadDone | ReadFailed | None] = {}  # until reported

    def __contains__(self, read: RayRead) -> bool:
        """Whether it is in flight."""
        return read in self._in_flight

    def prepare(
        self, peer: RayPeer, theirs: RegisteredRanges, pairs: Sequence[RegionPair]
    ) -> RayRead:
        """Ask the peer for an object of the remote regions; raises `WireError` for bad ones."""
        ours = self._memory.ranges
        found = merged(pairs, ours.holding, theirs.holding)
        ours.memory_of([local for local, _ in found])
        theirs.memory_of([remote for _, remote in found])
        targets = [self._memory.view(local) for local, _ in found]
        read = RayRead(peer.name, next(self._numbers), targets)
        peer.reads[read.number] = read
        regions = [(there.address, there.num_bytes, there.device) for _, there in found]
        self._lines[peer.name].post(peer.name, "ask", (read.number, regions))
        return read

    def release(self, read: RayRead) -> None:
        """Let the peer forget the object."""
        read.ref = None
        self._lines[read.peer_name].post(read.peer_name, "free", read.number)

    def post(self, read: RayRead, notification: bytes) -> None:
        """Begin to get the object, as soon as it is known."""
        if self.late is not None:
            raise WireError(f"no more reads, since bytes may still land: {self.late}")
        read.notification = notification
        self._in_flight[read] = None if read.failed is None else ReadFailed(read, read.failed)
        if read.ref is not None:
            self._fetch(read)

    def found(self, read: RayRead, envelope: Any) -> None:
        """The peer has made its object."""
        job = partial(self._direct.open, envelope, read.targets)
        self._jobs.run(job, partial(self._opened, read))

    def refused(self, read: RayRead, reason: str) -> None:
        """It can never be got."""
        read.failed = f"reading from {read.peer_name}: {reason}"
        if read in self._in_flight:
            self._in_flight[read] = ReadFailed(read, read.failed)

    def lose(self, peer: RayPeer, reason: str) -> None:
        """That peer is gone: what it has not answered it never will. Idempotent."""
        for read in peer.reads.values():
            if read.ref is None and read.failed is None:
                self.refused(read, reason)

    def ended(self) -> list[ReadDone | ReadFailed]:
        """What has ended since; it is in flight no more."""
        ended = {read: end for read, end in self._in_flight.items() if end is not None}
        for read in ended:
            del self._in_flight[read]
        return list(ended.values())

    def _opened(self, read: RayRead, outcome: "Future[Any]") -> None:
        if (error := outcome.exception()) is not None:
            self.refused(read, str(error))
            return
        read.ref = outcome.result()
        if read in self._in_flight:
            self._fetch(read)

    def _fetch(self, read: RayRead) -> None:
        job = partial(self._direct.read, read.ref, read.targets)
        self._jobs.run(job, partial(self._landed, read))

    def _landed(self, read: RayRead, outcome: "Future[None]") -> None:
        """Its end is told once its office has the notification: then the peer was there, and its
        memory what it was, for as long as the bytes were read. One that Ray gave up has no end."""
        error = outcome.exception()
        if isinstance(error, WireTimeoutError):
            self.late = f"reading from {read.peer_name} took more than {READ_SECONDS:g} s"
            _logger.error(
                "%s; its bytes may land at any time, so this wire reads no more", self.late
            )
        elif error is not None:
            self._end(read, str(error))
        else:
            told = partial(self._end, read)
            self._lines[read.peer_name].post(read.peer_name, "note", read.notification, told)

    def _end(self, read: RayRead, failure: str | None) -> None:
        reason = f"reading from {read.peer_name}: {failure}"
        self._in_flight[read] = ReadDone(read) if failure is None else ReadFailed(read, reason)
