"""A worker's link to its job: rendezvous client, progress thread and consumer, as one thing."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from rdt_plan import EpochRecord, Manifest, SyncPlan, decode_manifest
from rdt_plan.records import JobRecord
from rdt_transport.consumer import Consumer
from rdt_transport.destinations import Destination
from rdt_transport.errors import RdtTransportError, RendezvousLostError, SyncAbortedError
from rdt_transport.progress import ProgressThread
from rdt_transport.pulling import OnChunk, SyncStats
from rdt_transport.rendezvous import (
    ConnectionLost,
    ConsumerDropped,
    EpochFailed,
    RendezvousAddress,
    RendezvousClient,
    RendezvousEvent,
    SessionChanged,
)
from rdt_transport.wire.base import Wire
from rdt_vllm.errors import AttachedElsewhereError, InitInfoError, LifecycleError

__all__ = ["JobLink", "traffic_of"]

_logger = logging.getLogger("rdt_vllm")

DROP_TIMEOUT_SECONDS = 5.0  # telling the others that this worker failed must not hold it up


def traffic_of(stats: SyncStats | None, bytes_landed: int = 0) -> dict[str, Any]:
    """What a sync did, zeros without one, in builtin types that any executor can carry.

    ``bytes_pulled`` from trainers, of which ``bytes_direct`` into the model's own tensors and
    ``bytes_staged`` through slots; ``bytes_landed`` in parameters; and ``stage_seconds``, a dict:
    ``ready`` until the first read began, ``read`` and ``scatter`` summed over chunks, ``total``.
    """
    stats = stats or SyncStats(epoch=0, num_chunks=0)
    return {
        "bytes_pulled": stats.bytes_pulled,
        "bytes_direct": stats.bytes_direct,
        "bytes_staged": stats.bytes_staged,
        "bytes_landed": bytes_landed,
        "stage_seconds": dict(stats.stage_seconds),
    }


class JobLink:
    """Opened by its constructor and `attach`, ended by `close`; one a worker at a time.

    Args:
        address: of the job's rendezvous.
        make_wire: makes the wire; called on the progress thread.
        name: of this worker, for threads.
        device: that the model is on.
        timeout_seconds: deadline of every wait.

    Attributes:
        traffic: what the last committed epoch did: see `traffic_of`.

    Raises:
        WireError: there is no wire to be had (NIXL is missing or too old, say).
        RendezvousError: the rendezvous refuses or cannot be reached, or the producers stay away.
    """

    def __init__(
        self,
        address: RendezvousAddress,
        make_wire: Callable[[], Wire],
        *,
        name: str,
        device: torch.device | str,
        timeout_seconds: float,
    ) -> None:
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._consumer: Consumer | None = None
        self._lost: str | None = None
        self._stats: SyncStats | None = None
        self._bytes_landed = 0
        self._device = device
        self.traffic = traffic_of(None)
        with ExitStack() as undo:
            self._progress = ProgressThread(make_wire, name=f"{name}-progress", device=device)
            undo.callback(self._progress.close)
            self._client = RendezvousClient(
                address, on_event=self._on_event, connect_timeout_seconds=timeout_seconds
            )
            undo.callback(self._client.close)
            self.job: JobRecord = self._client.job(timeout_seconds)
            undo.pop_all()

    @property
    def lost(self) -> str | None:
        """Why this link is void; None while it is good."""
        return self._lost

    @property
    def consumer(self) -> Consumer:
        """The attached consumer; raises `LifecycleError` before `attach`."""
        if self._consumer is None:
            raise LifecycleError("this worker has not attached to its job")
        return self._consumer

    def check_free(self, address: RendezvousAddress) -> None:
        """Raise `AttachedElsewhereError` if a worker with this link may not join ``address``.

        It may when the link is void, or when the job is the same one.
        """
        ours = self.address
        if self._lost is None and (ours.job, ours.token) != (address.job, address.token):
            raise AttachedElsewhereError(
                f"this worker is attached to job {ours.job!r} at {ours}, and job {address.job!r} "
                f"at {address} asks for it: two trainers cannot push into one worker; end the "
                "first, or shut its weight transfer down"
            )

    def manifest(self) -> Manifest:
        """The job's, decoded; raises `WireFormatError`."""
        manifest = decode_manifest(self.job.manifest)
        self._client.know(manifest)
        return manifest

    def attach(
        self,
        plan: SyncPlan,
        num_workers: int,
        on_chunk: OnChunk,
        destinations: Destination,
    ) -> None:
        """Subscribe with ``plan``, connect to its producers and prepare every read.

        ``destinations`` gives the live tensors that direct chunks land in.

        Raises `RendezvousError` and `WireError` subclasses; call `close` then.
        """
        self._consumer = Consumer(
            self._progress,
            self._client,
            plan=plan,
            num_workers=num_workers,
            on_chunk=on_chunk,
            device=self._device,
            destinations=destinations,
        )
        self._bytes_landed = plan.bytes_landed
        self._consumer.attach(self._timeout_seconds)

    def start(self, session: str, epoch: int, record: EpochRecord | None = None) -> None:
        """Begin pulling that epoch; returns at once. Its record is asked for if it is not given.

        Raises `InitInfoError` when the session is not the one this worker attached to, and what
        `RendezvousClient.epoch_record` and `Consumer.start` raise.
        """
        if session != self.job.session:
            raise InitInfoError(
                f"update_info names session {session!r}, this worker is attached to session "
                f"{self.job.session!r} of job {self.job.job!r}: initialise the transfer again"
            )
        try:
            if self._lost is not None:
                raise SyncAbortedError(f"{self._lost}: initialise the transfer again")
            if record is None:
                record = self._client.epoch_record(self._timeout_seconds, epoch)
        except RendezvousLostError as error:  # we notice before we are told
            raise SyncAbortedError(f"{error}: initialise the transfer again") from error
        self.consumer.start(record)
        if self._lost is not None:  # told since we looked, when there was nothing to end yet
            self.consumer.fail(SyncAbortedError(f"{self._lost}: initialise the transfer again"))

    def wait(self) -> SyncStats:
        """Block until every chunk of the epoch is scattered; raises what ended it."""
        self._stats = self.consumer.wait(self._timeout_seconds)
        return self._stats

    def commit(self) -> None:
        """Have the epoch accepted; raises `TornError` when it is refused."""
        self.consumer.commit(self._timeout_seconds)
        if self._stats is not None:
            self.traffic = traffic_of(self._stats, self._bytes_landed)

    def give_up(self, epoch: int, error: BaseException) -> None:
        """Stop pulling, and have this worker's replica dropped; nothing is in flight afterwards.

        The other replicas finish without it. Nobody is dropped where the epoch failed anyway.
        """
        if self._lost is None:
            consumer = self.consumer
            name, incarnation = consumer.plan.consumer, consumer.incarnation.hex()
            try:
                self._client.drop(name, incarnation, str(error), DROP_TIMEOUT_SECONDS, epoch=epoch)
            except RdtTransportError as failure:
                _logger.warning("epoch %d: could not say that %s failed: %s", epoch, name, failure)
        try:
            self.consumer.abort(error)
        except RdtTransportError as failure:
            # What is still in flight could land in the next epoch.
            self._lost = self._lost or f"epoch {epoch} could not be ended ({failure})"
            raise

    def close(self) -> bool:
        """Detach and end the threads; errors are logged, so that all of it is tried. Idempotent.

        False while reads that land in the model itself are in flight still: nothing is closed then,
        so that they can end; call again.
        """
        try:
            if self._consumer is not None:
                self._consumer.close()
        except RdtTransportError as error:
            self._log(error)
            if self.consumer.is_busy() and self.consumer.plan.direct_bytes:
                self._lost = self._lost or "this link is closing"
                return False
        for close in (
            self._progress.close,
            self._client.leave if self._lost is None else None,
            self._client.close,
        ):
            try:
                if close is not None:
                    close()
            except RdtTransportError as error:
                self._log(error)
        self._consumer = None
        self._lost = self._lost or "this link is closed"
        return True

    def _log(self, error: RdtTransportError) -> None:
        _logger.warning("closing the link to job %s: %s", self.address.job, error)

    def _on_event(self, event: RendezvousEvent) -> None:
        consumer = self._consumer
        match event:
            case ConnectionLost(reason):
                self._lost = f"the rendezvous of job {self.address.job} is gone ({reason})"
            case SessionChanged(session):
                self._lost = f"job {self.address.job} has begun session {session}"
            case ConsumerDropped(dropped, incarnation, reason):
                if consumer is None or consumer.incarnation.hex() != incarnation:
                    return
                self._lost = f"consumer {dropped} was dropped ({reason})"
            case EpochFailed():
                if consumer is not None:
                    consumer.on_event(event)
                return
            case _:
                return
        if consumer is not None:
            consumer.fail(SyncAbortedError(self._lost))
