"""One epoch of one producer: drives the pure `ProducerEpoch` over the wire.

Everything here runs on the progress thread, but for the packs, which run on the serving thread, and
`wait_for_credit` and `wait_until_settled`, on which the publisher's thread blocks.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import torch

from rdt_plan import (
    ConsumerId,
    Doorbell,
    EpochRecord,
    EpochState,
    Finished,
    Kind,
    Pack,
    ProducerEpoch,
    Quiesced,
    Ready,
    Release,
)
from rdt_transport.errors import RdtTransportError, SyncAbortedError, SyncTimeoutError
from rdt_transport.events import Event, Events
from rdt_transport.intervals import Intervals
from rdt_transport.progress import ProgressThread
from rdt_transport.serve_ring import Served
from rdt_transport.serving_thread import ServingThread
from rdt_transport.wire.base import Wire

__all__ = ["Serving", "Sources"]

Sources = Mapping[str, torch.Tensor]


class _Published(NamedTuple):
    """A group's tensors, and the mark behind what the publisher enqueued to fill them."""

    sources: Sources
    filled: Event


class _Packing(NamedTuple):
    """A chunk, readable once ``event`` has completed, or an ``error``; copied from ``since`` on."""

    pack: Pack
    event: Event
    since: float | None = None
    error: BaseException | None = None


class Serving:
    """An open epoch; ``is_urgent`` where a DONE is what a slot waits for.

    Args:
        record: the frozen record of the epoch.
        live: its live consumers that this producer serves; those of one plan share a ring.
        groups: this rank's gather groups, in schedule order.
        lookahead: published groups that may be unreleased beyond the oldest one.
        standing: groups whose tensors are all stable: publishing them takes no credit.
        events: of the device that packs.
        rank: this producer's rank, for messages.
        incarnation: this producer's, the sender of its doorbells.
        progress: the thread that owns the wire.
        thread: packs on it; told to be quiet again when the epoch ended.
        on_unreachable: called with a consumer whose wire failed, and the reason.
        intervals: keeps when packs and gathers ran, if given.
    """

    def __init__(
        self,
        record: EpochRecord,
        live: Mapping[ConsumerId, Served],
        *,
        groups: Sequence[int],
        lookahead: int,
        standing: Collection[int],
        events: Events,
        rank: int,
        incarnation: bytes,
        progress: ProgressThread,
        thread: ServingThread,
        on_unreachable: Callable[[Served, str], None],
        intervals: Intervals | None = None,
    ) -> None:
        self.record = record
        self._live = live
        self._rank = rank
        self._incarnation = incarnation
        self._progress = progress
        self._thread = thread
        self._on_unreachable = on_unreachable
        self._standing = frozenset(standing)
        self._events = events
        self._intervals = intervals
        self._rings = {served.ring.table.plan_digest: served.ring for served in live.values()}
        self.is_urgent = any(ring.arena is not None for ring in self._rings.values())
        tables = {consumer: served.ring.table for consumer, served in live.items()}
        self._machine = ProducerEpoch(tables, groups, lookahead, self._standing)
        self._published: dict[int, _Published] = {}
        self._packing: list[_Packing] = []
        self._credited: float | None = time.perf_counter()  # None: the credit is spent
        self._changed = threading.Condition()
        self._may_publish = self._machine.may_publish()
        self._groups = tuple(groups)
        self._num_sent = self._num_arrived = 0  # groups published: by their thread, and here
        self._settled = self._machine.state is EpochState.FINISHED
        self._error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """True when nothing reads the sources any more (any thread)."""
        return self._settled

    # ---- the publisher's thread ------------------------------------------------------------

    def wait_for_credit(self, timeout_seconds: float) -> None:
        """Block until the next group may be published; raises what ended the epoch.

        A standing group is never waited for, so several of them may be on their way.
        """
        self._wait(lambda: self._may_publish or bool(self.standing_next()), timeout_seconds)
        self._credited = self._credited or time.perf_counter()

    def wait_until_settled(self, timeout_seconds: float) -> None:
        """Block until nothing reads the sources any more; raises what ended the epoch."""
        self._wait(lambda: self._settled, timeout_seconds)

    def wait_for_quiet(self, timeout_seconds: float, error: BaseException) -> None:
        """Like `wait_until_settled`, for an epoch that failed because of ``error``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled, timeout_seconds):
                raise SyncTimeoutError(
                    f"producer {self._rank}: a pack has not ended {timeout_seconds:g} s after the "
                    "abort; sources may still be read: leave them unchanged, or end this process"
                ) from error

    def standing_next(self, *, hold_back: bool = False) -> list[int]:
        """The groups to publish next that are standing; see `Producer.publish_standing`."""
        end = self._machine.num_incomplete if hold_back else None
        return list(takewhile(self._standing.__contains__, self._groups[self._num_sent : end]))

    def spend_credit(self, groups: Sequence[int]) -> None:
        """They are on their way to the progress thread, which gives none before they are there."""
        for group in groups:
            if self._intervals is not None and self._credited is not None:
                self._intervals.add("gather", group, self._credited)
        self._credited = None
        with self._changed:
            self._num_sent += len(groups)
            self._may_publish = False

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._error is not None or condition(), timeout_seconds
            )
            if self._error is not None:
                raise self._error
            if not met:
                raise SyncTimeoutError(
                    f"producer {self._rank}, epoch {self.record.epoch}: waited "
                    f"{timeout_seconds:g} s for {self._machine.waiting_for()}; raise "
                    "timeout_seconds if the peer is only slow; otherwise look at its log"
                )

    # ---- the serving thread ----------------------------------------------------------------

    def _pack(self, pack: Pack) -> None:
        """Copy one chunk into its serve slot, then say so on the progress thread."""
        ring, since = self._rings[pack.ring], time.perf_counter()
        try:
            if self._error is not None:
                raise self._error
            published = self._published[ring.table.chunks[pack.seq].group]
            with self._events.stream():
                self._events.wait(published.filled)
                ring.pack(pack.seq, published.sources)
                packing = _Packing(pack, self._events.record(), since)
        except Exception as error:
            with self._events.stream():  # some of its copies may be enqueued
                packing = _Packing(pack, self._events.record(), since, error)
        self._progress.submit(lambda wire: self._pack_enqueued(wire, [packing]))

    # ---- the progress thread ---------------------------------------------------------------

    def publish(self, wire: Wire, group: int, sources: Sources, filled: Event) -> None:
        """The full, contiguous tensors of ``group`` are readable, once ``filled``, until it is
        released."""
        self._num_arrived += 1
        if self._machine.state is EpochState.RUNNING:
            self._published[group] = _Published(sources, filled)
            self._perform(wire, self._machine.publish(group))

    def done(self, wire: Wire, served: Served, seq: int) -> None:
        """``served`` has read chunk ``seq``; ignored of one that takes no part in this epoch."""
        if self._live.get(served.consumer) is served:
            self._perform(wire, self._machine.done(served.consumer, seq))

    def drop(self, wire: Wire, incarnation: bytes, reason: str) -> None:
        """Go on without that consumer; ignored of one that takes no part in this epoch."""
        for consumer, served in self._live.items():
            if served.incarnation == incarnation:
                self._perform(wire, self._machine.drop(consumer, reason))

    def poll(self, wire: Wire) -> None:
        """Announce the chunks whose event has completed."""
        waiting, self._packing = self._packing, []
        for packing in waiting:
            if packing.event.query():
                self._pack_ended(wire, packing)
            else:
                self._packing.append(packing)

    def abort(self, wire: Wire, error: BaseException) -> None:
        """Start nothing new; settles once no pack reads the sources. Ignored when settled."""
        if not self._settled:
            self._fail(error)
            self._perform(wire, self._machine.abort(str(error)))

    def _pack_enqueued(self, wire: Wire, packings: Sequence[_Packing]) -> None:
        for packing in packings:
            if packing.error is None:
                pack = packing.pack
                self._perform(wire, self._machine.pack_enqueued(pack.ring, pack.seq))
        self._packing += packings
        self.poll(wire)

    def _pack_ended(self, wire: Wire, packing: _Packing) -> None:
        ring, seq = packing.pack.ring, packing.pack.seq
        if packing.error is None:
            if self._intervals is not None and packing.since is not None:
                self._intervals.add("pack", seq, packing.since)
            self._perform(wire, self._machine.packed(ring, seq))
            return
        actions = self._machine.pack_failed(ring, seq, str(packing.error))
        if self._machine.state in (EpochState.ABORTING, EpochState.QUIESCED):
            self._fail(packing.error)  # not that of a ring that nobody reads any more
        self._perform(wire, actions)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error

    def _perform(self, wire: Wire, actions: Sequence[object]) -> None:
        direct: list[_Packing] = []  # nothing to copy: readable once the publisher's work is done
        for action in actions:
            match action:
                case Pack(ring, seq):
                    chunk = self._rings[ring].table.chunks[seq]
                    if chunk.is_direct:
                        filled = self._published[chunk.group].filled
                        direct.append(_Packing(action, filled))
                    else:
                        self._thread.run(partial(self._pack, action))
                case Ready(consumer, seq):
                    self._announce(wire, self._live[consumer], seq)
                case Release(group):
                    self._published.pop(group, None)
                case Finished():
                    self._settle()
                case Quiesced(reason):
                    told = f"producer {self._rank}, epoch {self.record.epoch}: {reason}"
                    self._fail(SyncAbortedError(told))
                    self._settle()
        with self._changed:
            arrived = self._num_arrived == self._num_sent
            self._may_publish = arrived and self._machine.may_publish()
            if self._may_publish or self._settled or self._error is not None:
                self._changed.notify_all()  # nobody waits for less, and every doorbell comes by
        if direct:
            self._pack_enqueued(wire, direct)

    def _announce(self, wire: Wire, served: Served, seq: int) -> None:
        ready = Doorbell(
            session=bytes.fromhex(self.record.session),
            epoch=self.record.epoch,
            sender=self._incarnation,
            receiver=served.incarnation,
            kind=Kind.READY,
            seq=seq,
        )
        try:
            wire.notify(served.wire_name, ready.encode())
        except RdtTransportError as error:
            reason = f"producer {self._rank} cannot reach it: {error}"
            self._on_unreachable(served, reason)
            self.drop(wire, served.incarnation, reason)

    def _settle(self) -> None:
        self._published.clear()
        self._thread.set_quiet(True)  # before anybody can begin the next epoch
        with self._changed:
            self._settled = True
