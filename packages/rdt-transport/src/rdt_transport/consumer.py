"""The consumer's session: pulls the chunks of its plan, epoch after epoch.

Callers' threads submit and wait; what happens to the wire happens on the progress thread.
"""

import logging
from collections.abc import Callable

import torch

from rdt_plan import Doorbell, EpochRecord, Kind, Mailbox, SyncPlan, Verdict
from rdt_transport.attachment import Attachment
from rdt_transport.destinations import Destination
from rdt_transport.errors import SyncAbortedError, SyncTimeoutError, TornError
from rdt_transport.events import Event, events_of
from rdt_transport.failures import Failures
from rdt_transport.intervals import Intervals
from rdt_transport.progress import ProgressThread
from rdt_transport.pulling import OnChunk, Pulling, SyncStats
from rdt_transport.rendezvous import RendezvousClient, RendezvousEvent
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["Consumer"]

_logger = logging.getLogger(__name__)

ABORT_TIMEOUT_SECONDS = 10.0  # a posted read over any fabric ends or fails well within this


class Consumer:
    """Pulls one worker's plan.

    Args:
        progress: the thread that owns the wire.
        client: connection to the rendezvous; not owned. Its events must reach `on_event`.
        plan: what to pull, from whom, into which slot.
        num_workers: workers of this consumer's replica.
        on_chunk: called on the progress thread with a landed chunk and its packed bytes (uint8,
            1-D, valid until `scattered`); it must only queue. Every chunk it is given must be
            answered by `scattered` or `scatter_failed`, in an aborted epoch as well. Direct chunks
            do not reach it.
        device: where the receive slots and the model's tensors live: "cpu" or a GPU of CUDA.
        destinations: the live tensor of (module, param), for the direct chunks of the plan; their
            storages are registered by `attach`, and asked for anew by every `start`.

    Raises `WireError` for another device, and for direct chunks without destinations.
    """

    def __init__(
        self,
        progress: ProgressThread,
        client: RendezvousClient,
        *,
        plan: SyncPlan,
        num_workers: int,
        on_chunk: OnChunk,
        device: torch.device | str = "cpu",
        destinations: Destination | None = None,
    ) -> None:
        self._events = events_of(device)
        self.plan = plan
        self._progress = progress
        self._client = client
        self._num_workers = num_workers
        self._on_chunk = on_chunk
        self._attachment = Attachment(progress, plan, device, destinations)
        self._failures = Failures(self._attachment.incarnation)
        self._mailbox = Mailbox(plan.max_unread)
        self.intervals: Intervals | None = None
        self._records_intervals = False
        self._pulling: Pulling | None = None
        self._addressee: Pulling | None = None  # of what the mailbox delivers; they move together

    @property
    def incarnation(self) -> bytes:
        """16 bytes, new with every consumer object: the receiver's name in doorbells."""
        return self._attachment.incarnation

    def attach(self, timeout_seconds: float) -> None:
        """Join the job: see `Attachment.open`."""
        self._attachment.open(self, self._client, self._num_workers, timeout_seconds)

    def record_intervals(self, on: bool) -> None:
        """Keep in ``intervals`` when the stages of the last epoch ran, from the next one on."""
        self._records_intervals = on

    # ---- one epoch, from the caller's threads ----------------------------------------------

    def expect(self) -> None:
        """An epoch is about to begin: what producers say of it is heard from now on."""
        self._progress.submit(lambda wire: None, self)  # a quiet wire is polled seldom

    def start(self, record: EpochRecord) -> None:
        """Begin pulling epoch ``record.epoch``; returns at once.

        Nothing is read before what is enqueued on the caller's current stream has completed.

        Raises `TornError` when this incarnation is not in the record's live set,
        `SyncAbortedError` while an earlier epoch is open, and `WireError` when a tensor that is
        read directly was replaced.
        """
        if self.is_busy():
            raise SyncAbortedError(
                f"consumer {self.plan.consumer}: epoch {self._open_epoch().record.epoch} is still "
                f"open, so epoch {record.epoch} cannot begin: wait for it, or abort it, first"
            )
        if self.incarnation.hex() not in {incarnation for _, incarnation in record.live}:
            raise TornError(
                f"consumer {self.plan.consumer} is not live in epoch {record.epoch}: it was "
                "dropped, or joined later; initialise the weight transfer again"
            )
        self._attachment.check()
        self.intervals = Intervals() if self._records_intervals else None
        pulling = Pulling(
            self.plan,
            self._attachment,
            record,
            self._on_chunk,
            self._events.record(),
            self.intervals,
        )
        self._pulling = pulling

        def begin(wire: Wire) -> None:
            pulling.begin(wire)
            self._addressee = pulling
            for doorbell in self._mailbox.open(bytes.fromhex(record.session), record.epoch):
                self._ready(wire, pulling, doorbell)

        self._progress.submit(begin, self)
        self._heed_failures()

    def scattered(self, index: int, event: Event) -> None:
        """The copies that read chunk ``index``'s slot are enqueued; ``event`` follows them."""
        self._submit(lambda wire, pulling: pulling.scattered(wire, index, event))

    def scatter_failed(self, index: int, error: BaseException) -> None:
        """Give chunk ``index``'s slot back: it could not be, or will not be, installed."""
        self._submit(lambda wire, pulling: pulling.scatter_failed(wire, index, error))

    def wait(self, timeout_seconds: float) -> SyncStats:
        """Block until every chunk has been scattered.

        Raises the error that ended the epoch, or `SyncTimeoutError` naming what it waited for; the
        epoch is then aborted and nothing of it is in flight. One that failed has
        `ABORT_TIMEOUT_SECONDS` to drain; `SyncTimeoutError` says when it did not.
        """
        pulling = self._open_epoch()
        if not pulling.decided.wait(timeout_seconds):
            self.abort(
                SyncTimeoutError(
                    f"consumer {self.plan.consumer}, epoch {pulling.record.epoch}: waited "
                    f"{timeout_seconds:g} s for {pulling.waiting_for()}; raise timeout_seconds if "
                    "the peer is only slow; otherwise look at its log"
                )
            )
        self._drain(pulling, pulling.error)
        if pulling.error is not None:
            raise pulling.error
        return pulling.stats

    def abort(self, error: BaseException) -> None:
        """Stop pulling because of ``error``, and wait until nothing is in flight; idempotent.

        Raises `SyncTimeoutError` when reads or scatters do not drain.
        """
        pulling = self._open_epoch()
        self.fail(error)
        self._drain(pulling, error)

    def _drain(self, pulling: Pulling, error: BaseException | None) -> None:
        if not pulling.settled.wait(ABORT_TIMEOUT_SECONDS):
            error = pulling.error or error
            raise SyncTimeoutError(
                f"consumer {self.plan.consumer}: still in flight {ABORT_TIMEOUT_SECONDS:g} s after "
                f"the abort: {pulling.waiting_for()}; shut this worker down; aborted by: {error}"
            ) from error

    def fail(self, error: BaseException) -> None:
        """Like `abort`, without waiting (any thread); ignored when no epoch is open."""
        if self.is_busy():  # the progress thread may be closed already, otherwise
            self._submit(lambda wire, pulling: pulling.abort(wire, error))

    def commit(self, timeout_seconds: float) -> None:
        """Ask the rendezvous to accept this worker's epoch; `TornError` when it refuses."""
        epoch = self._open_epoch().record.epoch
        self._client.commit(self.plan.consumer, self.incarnation.hex(), epoch, timeout_seconds)

    def close(self) -> None:
        """Abort an open epoch, then detach; the wire stays open. Idempotent."""
        if self.is_busy():
            self.abort(SyncAbortedError(f"consumer {self.plan.consumer} closes"))
        self._attachment.close(self)

    def on_event(self, event: RendezvousEvent) -> None:
        """React to a push of the rendezvous (any thread)."""
        self._failures.note(event)
        self._heed_failures()

    def _heed_failures(self) -> None:
        """A failure may be told before the epoch is started, or after: both come by here."""
        if (pulling := self._pulling) is not None:
            if (error := self._failures.of(pulling.record.epoch)) is not None:
                self.fail(error)

    def _open_epoch(self) -> Pulling:
        if self._pulling is None:
            raise SyncAbortedError(f"consumer {self.plan.consumer}: no epoch has been started")
        return self._pulling

    def _submit(self, call: Callable[[Wire, Pulling], None]) -> None:
        pulling = self._pulling
        if pulling is not None:
            self._progress.submit(lambda wire: call(wire, pulling), self)

    # ---- the progress thread: an endpoint --------------------------------------------------

    def is_busy(self) -> bool:
        """True while an epoch is open: the wire is polled eagerly."""
        return self._pulling is not None and not self._pulling.settled.is_set()

    def on_doorbell(self, wire: Wire, sender: str, doorbell: Doorbell) -> None:
        """A READY: of this epoch, of the next (kept), or stale or of a stranger (dropped)."""
        if not self._attachment.is_from(doorbell.sender, sender):
            _logger.debug("consumer %s: dropped a doorbell of %s", self.plan.consumer, sender)
            return
        verdict = self._mailbox.accept(doorbell)
        if doorbell.kind is Kind.READY and verdict is Verdict.DELIVER and self._addressee:
            self._ready(wire, self._addressee, doorbell)

    def on_read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        """A posted read ended."""
        if self._pulling is not None:
            self._pulling.read(wire, event)

    def on_poll(self, wire: Wire) -> None:
        """Once a loop."""
        if self._pulling is not None:
            self._pulling.poll(wire)

    def is_urgent(self) -> bool:
        """A READY and an ended read are both followed by the next read."""
        return True

    def on_error(self, error: BaseException) -> None:
        """A callback raised."""
        _logger.error("consumer %s: %s", self.plan.consumer, error, exc_info=error)
        self.fail(error)

    def _ready(self, wire: Wire, pulling: Pulling, doorbell: Doorbell) -> None:
        owner = self._attachment.rank(doorbell.sender)
        if owner is not None:
            pulling.ready(wire, owner, doorbell.seq)
