"""One epoch of one producer: drives the pure `ProducerEpoch` over the wire.

Everything here runs on the progress thread, but for the packs, which run on the serving thread, and
`wait_for_credit` and `wait_until_settled`, on which the publisher's thread blocks.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
from rdt_transport.events import Event, HostEvents
from rdt_transport.progress import ProgressThread
from rdt_transport.serve_ring import Served
from rdt_transport.serving_thread import ServingThread
from rdt_transport.wire.base import Wire

__all__ = ["Serving"]

Sources = Mapping[str, torch.Tensor]


class Serving:
    """An open epoch.

    Args:
        record: the frozen record of the epoch.
        live: its live consumers that this producer serves; those of one plan share a ring.
        groups: this rank's gather groups, in schedule order.
        lookahead: published groups that may be unreleased beyond the oldest one.
        rank: this producer's rank, for messages.
        incarnation: this producer's, the sender of its doorbells.
        progress: the thread that owns the wire.
        thread: packs on it; told to be quiet again when the epoch ended.
        on_unreachable: called with a consumer whose wire failed, and the reason.
    """

    def __init__(
        self,
        record: EpochRecord,
        live: Mapping[ConsumerId, Served],
        *,
        groups: Sequence[int],
        lookahead: int,
        rank: int,
        incarnation: bytes,
        progress: ProgressThread,
        thread: ServingThread,
        on_unreachable: Callable[[Served, str], None],
    ) -> None:
        self.record = record
        self._live = live
        self._rank = rank
        self._incarnation = incarnation
        self._progress = progress
        self._thread = thread
        self._on_unreachable = on_unreachable
        self._events = HostEvents()
        self._rings = {served.ring.table.plan_digest: served.ring for served in live.values()}
        tables = {consumer: served.ring.table for consumer, served in live.items()}
        self._machine = ProducerEpoch(tables, groups, lookahead)
        self._sources: dict[int, Sources] = {}
        self._packing: list[tuple[str, int, Event]] = []
        self._changed = threading.Condition()
        self._may_publish = self._machine.may_publish()
        self._publishing = False
        self._settled = self._machine.state is EpochState.FINISHED
        self._error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """True when nothing reads the sources any more (any thread)."""
        return self._settled

    # ---- the publisher's thread ------------------------------------------------------------

    def wait_for_credit(self, timeout_seconds: float) -> None:
        """Block until one more group may be published; raises what ended the epoch."""
        self._wait(lambda: self._may_publish, timeout_seconds)

    def wait_until_settled(self, timeout_seconds: float) -> None:
        """Block until nothing reads the sources any more; raises what ended the epoch."""
        self._wait(lambda: self._settled, timeout_seconds)

    def wait_for_quiet(self, timeout_seconds: float) -> bool:
        """Like `wait_until_settled` for an epoch that failed: says whether it settled."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled, timeout_seconds)

    def spend_credit(self) -> None:
        """A publish is on its way to the progress thread; no other before it is there."""
        with self._changed:
            self._publishing = True
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
        ring = self._rings[pack.ring]
        try:
            if self._error is not None:
                raise self._error
            ring.pack(pack.seq, self._sources[ring.table.chunks[pack.seq].group])
            event = self._events.record()
        except Exception as error:
            reason = error
            self._progress.submit(lambda wire: self._pack_failed(wire, pack, reason))
        else:
            self._progress.submit(lambda wire: self._pack_enqueued(wire, pack, event))

    # ---- the progress thread ---------------------------------------------------------------

    def publish(self, wire: Wire, group: int, sources: Sources) -> None:
        """The full, contiguous tensors of ``group`` are readable until it is released."""
        self._publishing = False
        if self._machine.state is EpochState.RUNNING:
            self._sources[group] = sources
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
        """Announce the packs whose event has completed."""
        waiting, self._packing = self._packing, []
        for ring, seq, event in waiting:
            if event.query():
                self._perform(wire, self._machine.packed(ring, seq))
            else:
                self._packing.append((ring, seq, event))

    def abort(self, wire: Wire, error: BaseException) -> None:
        """Start nothing new; settles once no pack reads the sources. Ignored when settled."""
        if not self._settled:
            self._fail(error)
            self._perform(wire, self._machine.abort(str(error)))

    def _pack_enqueued(self, wire: Wire, pack: Pack, event: Event) -> None:
        self._perform(wire, self._machine.pack_enqueued(pack.ring, pack.seq))
        self._packing.append((pack.ring, pack.seq, event))
        self.poll(wire)

    def _pack_failed(self, wire: Wire, pack: Pack, error: BaseException) -> None:
        actions = self._machine.pack_failed(pack.ring, pack.seq, str(error))
        if self._machine.state in (EpochState.ABORTING, EpochState.QUIESCED):
            self._fail(error)  # not that of a ring that nobody reads any more
        self._perform(wire, actions)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error

    def _perform(self, wire: Wire, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Pack():
                    self._thread.run(partial(self._pack, action))
                case Ready(consumer, seq):
                    self._announce(wire, self._live[consumer], seq)
                case Release(group):
                    self._sources.pop(group, None)
                case Finished():
                    self._settle()
                case Quiesced(reason):
                    self._fail(
                        SyncAbortedError(
                            f"producer {self._rank}, epoch {self.record.epoch}: {reason}"
                        )
                    )
                    self._settle()
        with self._changed:
            self._may_publish = self._machine.may_publish() and not self._publishing
            if self._may_publish or self._settled or self._error is not None:
                self._changed.notify_all()  # nobody waits for less, and every doorbell comes by

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
        self._sources.clear()
        self._thread.set_quiet(True)  # before anybody can begin the next epoch
        with self._changed:
            self._settled = True
