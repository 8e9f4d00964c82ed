"""The producer's session: publishes gather groups and serves every consumer's chunks of them.

Three threads, one job each: the caller's publishes and waits; the progress thread drives the open
epoch; the serving thread packs, and admits consumers between epochs.
"""

import logging
import uuid
from collections.abc import Mapping

import torch

from rdt_plan import (
    ChunkTable,
    Doorbell,
    EpochRecord,
    Manifest,
    ProducerRecord,
    Subscription,
    rank_schedule,
)
from rdt_transport.done_mail import DoneMail
from rdt_transport.errors import SyncAbortedError
from rdt_transport.events import Event, events_of
from rdt_transport.failures import Failures
from rdt_transport.intervals import Intervals
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import (
    ConsumerDropped,
    ConsumerLeft,
    JobSettings,
    RendezvousClient,
    RendezvousEvent,
    Subscribed,
)
from rdt_transport.serve_ring import Served
from rdt_transport.serve_rings import ServeRings
from rdt_transport.serving import Serving, Sources
from rdt_transport.serving_thread import ServingThread
from rdt_transport.stable_sources import StableSources
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["Producer"]

_logger = logging.getLogger(__name__)

QUIESCE_TIMEOUT_SECONDS = 60.0  # one pack of the largest chunk ends well within this


class Producer:
    """Serves what trainer rank ``rank`` holds.

    Args:
        progress: the thread that owns the wire.
        client: connection to the rendezvous; not owned. Its events must reach `on_event`.
        rank: this producer's rank among the job's producers.
        manifest: the whole model.
        settings: the job's; its lookahead bounds the resident groups to ``lookahead + 1``.
        device: where the serve slots live, and the tensors published: "cpu" or a GPU of CUDA.
        sources: stable tensors, by name: what this rank holds of it, contiguous, at an address that
            stays. Registered by `open`; consumers may read them without a slot.

    Raises `WireError` for another device, `SliceError` for a source that is not as declared.
    """

    def __init__(
        self,
        progress: ProgressThread,
        client: RendezvousClient,
        *,
        rank: int,
        manifest: Manifest,
        settings: JobSettings,
        device: torch.device | str = "cpu",
        sources: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._events = events_of(device)
        self.incarnation = uuid.uuid4().bytes
        self.rank = rank
        self.groups = rank_schedule(manifest, rank)
        self._progress = progress
        self._client = client
        self._manifest = manifest
        self._settings = settings
        self._thread = ServingThread(f"rdt-serve-{rank}", self.fail)
        self._gone: dict[bytes, str] = {}
        self._sources = StableSources(manifest, rank, sources or {}, device)
        self._rings = ServeRings(
            progress,
            client,
            rank=rank,
            incarnation=self.incarnation,
            manifest=manifest,
            num_slots=settings.num_slots,
            device=device,
            gone=self._gone,
            sources=self._sources.names,
        )
        self._failures = Failures()
        self._mail = DoneMail(rank, settings.num_slots, self._rings)
        self._serving: Serving | None = None
        self.intervals: Intervals | None = None
        self._records_intervals = False

    # ---- the caller's thread ---------------------------------------------------------------

    def open(self, timeout_seconds: float) -> None:
        """Publish this producer at the rendezvous; consumers are admitted from then on."""
        self._progress.call(lambda wire: wire.register(self._sources.buffers), timeout_seconds)
        address = self._progress.call(lambda wire: wire.address(), timeout_seconds)
        self._progress.attach(self)
        self._thread.run(self._events.bind_with_stream)
        self._thread.start()
        record = ProducerRecord(
            rank=self.rank,
            incarnation=self.incarnation.hex(),
            wire_name=address.name,
            metadata=address.metadata,
            manifest_digest=self._manifest.digest,
            sources=self._sources.regions,
        )
        self._client.publish(record, self._manifest, timeout_seconds)

    def begin(self, record: EpochRecord) -> None:
        """Open epoch ``record.epoch`` for its live consumers, when no admission is under way."""
        if self.is_busy():
            still = f"epoch {self._open_epoch().record.epoch} is still open: finish it, or abort it"
            raise SyncAbortedError(f"producer {self.rank}: {still}, before epoch {record.epoch}")
        self._thread.set_quiet(False)
        try:
            serving = self._serve(record)
        except BaseException:
            self._thread.set_quiet(True)
            raise
        self._serving = serving
        if serving.settled:
            self._thread.set_quiet(True)
        self._progress.submit(lambda wire: self._mail.open(wire, serving), self)
        # What the rendezvous told between its answer to `begin` and this call.
        for gone in [bytes.fromhex(incarnation) for _, incarnation in record.live]:
            if (reason := self._gone.get(gone)) is not None:
                self._drop(gone, reason)
        self._heed_failures()

    def _serve(self, record: EpochRecord) -> Serving:
        self._thread.wait_for_quiet_job(QUIESCE_TIMEOUT_SECONDS)
        self.intervals = Intervals() if self._records_intervals else None
        return Serving(
            record,
            self._rings.live(record),
            groups=self.groups,
            lookahead=self._settings.lookahead,
            standing=self._sources.groups,
            events=self._events,
            rank=self.rank,
            incarnation=self.incarnation,
            progress=self._progress,
            thread=self._thread,
            on_unreachable=self._unreachable,
            intervals=self.intervals,
        )

    def record_intervals(self, on: bool) -> None:
        """Keep in ``intervals`` when the stages of the last epoch ran, from the next one on."""
        self._records_intervals = on

    def wait_for_credit(self, timeout_seconds: float) -> None:
        """Block until one more group may be resident: call it before gathering the group.

        Raises what ended the epoch, or `SyncTimeoutError` naming whom it waited for.
        """
        self._open_epoch().wait_for_credit(timeout_seconds)

    def publish(
        self, group: int, tensors: Mapping[str, torch.Tensor], timeout_seconds: float
    ) -> None:
        """Serve group ``group``: what this rank holds of each name. Groups follow ``self.groups``.

        The tensors are read once what is enqueued on the caller's current stream has completed, and
        must not change before `finish` returns. Blocks for credit. Raises `SliceError` for a tensor
        that is not as the manifest says, and for a stable one that was not registered there.
        """
        serving = self._open_epoch()
        sources = {name: self._sources.checked(name, each) for name, each in tensors.items()}
        filled = self._events.record()
        serving.wait_for_credit(timeout_seconds)
        self._publish(serving, {group: sources}, filled)

    def publish_standing(self, tensors: Sources, *, hold_back: bool = False) -> int:
        """Serve what is next in ``self.groups`` while it is nothing but sources; how many groups.

        As `publish`, without a step for each name (``tensors``: see `StableSources.check`).
        ``hold_back``: none with which a replica would have all that it reads here. Those published
        are on their way by then, whatever keeps the interpreter busy after.
        """
        self._sources.check(tensors)
        serving, groups = self._open_epoch(), self._sources.groups
        if held := {group: groups[group] for group in serving.standing_next(hold_back=hold_back)}:
            serving.wait_for_credit(0.0)  # raises what ended the epoch
            self._publish(serving, held, self._events.record())
            self._progress.call(lambda wire: None, QUIESCE_TIMEOUT_SECONDS)
        return len(held)

    def _publish(self, serving: Serving, groups: Mapping[int, Sources], filled: Event) -> None:
        serving.spend_credit(list(groups))

        def arrive(wire: Wire) -> None:
            for group, sources in groups.items():
                serving.publish(wire, group, sources, filled)

        self._progress.submit(arrive, self)

    def finish(self, timeout_seconds: float) -> None:
        """Block until nobody who may commit reads the sources; raises what ended the epoch."""
        self._open_epoch().wait_until_settled(timeout_seconds)

    def tables(self, record: EpochRecord) -> list[ChunkTable]:
        """What the live consumers of an epoch read here."""
        return [served.ring.table for served in self._rings.live(record).values()]

    def abort(self, error: BaseException) -> None:
        """End the epoch with ``error`` and wait until no pack reads the sources; idempotent."""
        self.fail(error)
        self._open_epoch().wait_for_quiet(QUIESCE_TIMEOUT_SECONDS, error)

    def fail(self, error: BaseException) -> None:
        """Like `abort`, without waiting (any thread); ignored when no epoch is open."""
        if (serving := self._serving) and not serving.settled:  # the thread may be closed, else
            self._progress.submit(lambda wire: serving.abort(wire, error), self)

    def close(self) -> None:
        """Abort an open epoch, stop serving, and leave the progress thread. Idempotent."""
        if self.is_busy():
            self.abort(SyncAbortedError(f"producer {self.rank} closes"))
        self._thread.close(QUIESCE_TIMEOUT_SECONDS)
        self._progress.detach(self)

    def on_event(self, event: RendezvousEvent) -> None:
        """React to a push of the rendezvous (any thread)."""
        self._failures.note(event)
        self._heed_failures()
        match event:
            case Subscribed(subscription):
                self._thread.run_when_quiet(lambda: self._admit(subscription))
            case ConsumerDropped(_, incarnation, reason):
                self._lose(bytes.fromhex(incarnation), reason)
            case ConsumerLeft(_, incarnation):
                self._lose(bytes.fromhex(incarnation), "it left")

    def _admit(self, new: Subscription) -> None:
        done = self._rings.admit(new)  # slice by slice: an epoch may begin in between
        self._thread.run_when_quiet(self._rings.make_offers if done else lambda: self._admit(new))

    def _open_epoch(self) -> Serving:
        if self._serving is None:
            raise SyncAbortedError(f"producer {self.rank}: no epoch has begun")
        return self._serving

    def _heed_failures(self) -> None:
        """A failure may be told before the epoch is begun, or after: both come by here."""
        if (serving := self._serving) and (error := self._failures.of(serving.record.epoch)):
            self.fail(error)

    def _lose(self, gone: bytes, reason: str) -> None:
        self._gone[gone] = reason
        self._drop(gone, reason)
        self._thread.run_when_quiet(lambda: self._rings.dismiss(gone))

    def _drop(self, gone: bytes, reason: str) -> None:
        if (serving := self._serving) and not serving.settled:  # as in `fail`
            self._progress.submit(lambda wire: serving.drop(wire, gone, reason), self)

    def _unreachable(self, served: Served, reason: str) -> None:
        _logger.warning("%s: %s", served.consumer, reason)
        who = served.consumer, served.incarnation.hex()
        self._thread.run(lambda: self._client.drop(*who, reason))

    # ---- the progress thread: an endpoint --------------------------------------------------

    def is_busy(self) -> bool:
        return self._serving is not None and not self._serving.settled

    def on_doorbell(self, wire: Wire, sender: str, doorbell: Doorbell) -> None:
        self._mail.accept(wire, sender, doorbell)

    def on_read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        """A producer reads nothing."""

    def is_urgent(self) -> bool:
        """A DONE lets a slot be packed again; without slots it only brings the end nearer."""
        return self._serving is not None and self._serving.is_urgent

    def on_poll(self, wire: Wire) -> None:
        if (serving := self._serving) is not None:
            serving.poll(wire)

    def on_error(self, error: BaseException) -> None:
        _logger.error("producer %d: %s", self.rank, error, exc_info=error)
        self.fail(error)
