"""The trainer: attaches inference servers to a source of weights, and sends them every new set."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from rdt_plan import Manifest
from rdt_trainer.arguments import check_arguments, check_client, checked_wire, listed
from rdt_trainer.client import Client
from rdt_trainer.collector import GroupCollector
from rdt_trainer.devices import served_device
from rdt_trainer.errors import TrainerStateError
from rdt_trainer.hosting import Hosting
from rdt_trainer.job import Job
from rdt_trainer.numbering import EpochNumbering
from rdt_trainer.report import SyncReport
from rdt_trainer.source import AdaptedSource, Exchange, adapt
from rdt_trainer.sync import Sync
from rdt_transport.intervals import Interval
from rdt_transport.rendezvous import (
    ConnectionLost,
    JobSettings,
    RendezvousAddress,
    RendezvousEvent,
)
from rdt_transport.wire.base import Wire

__all__ = ["RdtTrainer"]


class RdtTrainer:
    """Serves one source's weights to inference servers; one instance a trainer rank.

    `init`, `send_weights` and `close` are called on every rank, in the same order. Rank 0 hosts
    the rendezvous and drives the servers.

    Args:
        source: a `rdt_trainer.WeightSource`, or one in the shape of vLLM 0.32's.
        client: rank 0: the inference deployment, or a list of them, whose places are their
            replica numbers; see also `add_replica`. None on the other ranks.
        rank: this process's rank among ``settings.num_producers``.
        settings: what the whole job agrees on; by default one producer, and a replica a client.
            Its replicas are those that the job starts with.
        rendezvous: the address of one that is hosted elsewhere, on every rank. None: rank 0 hosts
            it, and tells the other ranks over ``torch.distributed``.
        ray: host the rendezvous as a Ray actor: "auto" (in the Ray this process has initialised), a
            cluster's address to join, or "local" to start one. None: in this process.
        job: the job's name; made up by default.
        host: where an in-process rendezvous listens; workers on other nodes need this node's
            address.
        device: where this rank's source yields its tensors, and where serve slots live: "cpu" or
            "cuda". None: that of the source's stable tensors, or the CPU without any.
        timeout_seconds: of each single wait, here and in the workers: for the other ranks, for
            servers to attach, for consumers to pull a group, for servers to finish. Longer than a
            whole sync takes, as some ranks end before others.
        exchange: see `rdt_trainer.adapt`.
        unconsumed: rank 0: patterns (as a shell's) of names that no worker needs to read, and whose
            loaders may refuse them.
        wire: "nixl", or "ray" (or "ray:" and a tensor transport of Ray's), in a process that is
            attached to Ray; the workers attach to the same cluster. The same on every rank.
        make_wire: makes the wire to serve over, on its own thread; by default that of ``wire``.

    Raises:
        SettingsError: arguments that contradict each other.
    """

    def __init__(
        self,
        source: Any,
        client: Client | Sequence[Client] | None = None,
        *,
        rank: int = 0,
        settings: JobSettings | None = None,
        rendezvous: RendezvousAddress | None = None,
        ray: str | None = None,
        job: str | None = None,
        host: str = "127.0.0.1",
        device: torch.device | str | None = None,
        timeout_seconds: float = 120.0,
        exchange: Exchange | None = None,
        unconsumed: Sequence[str] = (),
        wire: str = "nixl",
        make_wire: Callable[[], Wire] | None = None,
    ) -> None:
        clients = listed(client)
        self._settings = settings or JobSettings(num_producers=1, num_replicas=len(clients) or 1)
        check_arguments(rank, clients, self._settings, timeout_seconds)
        self._rank = rank
        self._clients = clients
        self._source = source
        self._exchange = exchange
        self._unconsumed = unconsumed
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._wire = chosen = checked_wire(wire)
        self._make_wire = make_wire or (lambda: chosen.serving(f"producer{rank}"))
        self._hosting = Hosting(rank, self._settings, rendezvous, ray=ray, job=job, host=host)
        self._adapted: AdaptedSource | None = None
        self._job: Job | None = None
        self._sync: Sync | None = None
        self._numbering = EpochNumbering()
        self._intervals: tuple[Interval, ...] = ()
        self._lost: str | None = None  # why the rendezvous is gone
        self._in_use = threading.Lock()
        self._closed = False

    def init(self) -> None:
        """Open the job and attach every server's workers; blocks until they are attached.

        Raises:
            SourceError, ManifestError: the source describes itself wrongly, or serves a name that
                no worker of any server reads.
            SettingsError: a device that is not served, or that is not there.
            ClientError: a server refused, carries its words; or it did not answer in time.
            RankFailedError: another rank failed before all knew where the rendezvous is.
            RdtTransportError: the rendezvous, the wire, or another rank that disagrees.
        """
        with self._exclusively():
            if self._job is not None:
                raise TrainerStateError("init() was called already: expected once a trainer")
            try:
                self._adapted, manifest = self._describe()
                device = served_device(self._device, self._adapted.stable)
            except Exception as error:
                self._hosting.refuse(error)
                raise
            self._job = Job(
                self._hosting,
                rank=self._rank,
                manifest=manifest,
                settings=self._settings,
                clients=self._clients,
                device=device,
                stable=self._adapted.stable,
                unconsumed=self._unconsumed,
                wire=self._wire,
                make_wire=self._make_wire,
                on_event=self._on_event,
                timeout_seconds=self._timeout_seconds,
            )

    def send_weights(self, weight_version: str | None = None) -> SyncReport:
        """Send the source's present weights; on every rank, and all succeed or all raise.

        Returns once every replica has them or was dropped, at least one has them, and nobody reads
        the source's tensors any more; the report names who has them, and who has not and why.
        Replicas that were dropped before are attached again first. ``weight_version`` is what the
        servers report from then on, by default the epoch's number. After an error the next call
        starts afresh.

        Raises:
            SourceError: this rank's source yielded other than it declared, or raised, or changed
                a yielded tensor in place meanwhile.
            SyncFailedError: anything else, or no replica is left; the first error on any rank is
                its cause or its reason.
            TrainerStateError: not initialised, closed, in use, or every server is still in a call.
        """
        with self._exclusively():
            job, source = self._job, self._adapted
            if job is None or source is None:
                raise TrainerStateError("send_weights() came before init(): call it on every rank")
            sync = Sync(
                self._numbering,
                rank=self._rank,
                new_pass=lambda: GroupCollector.of(source, job.manifest, self._rank, job.device),
                producer=job.producer,
                num_bytes=job.num_bytes,
                rendezvous=job.rendezvous,
                control=job.control,
                restore=job.restore,
                timeout_seconds=self._timeout_seconds,
            )
            self._sync = sync
            try:
                return sync.run(weight_version)
            finally:
                self._sync = None
                self._intervals = (*(job.producer.intervals or ()), *sync.intervals)

    def record_intervals(self, on: bool) -> None:
        """Keep when this rank gathered and packed in each sync, from now on, or no more.

        Raises `TrainerStateError` before `init`.
        """
        if self._job is None:
            raise TrainerStateError("record_intervals() came before init()")
        self._job.producer.record_intervals(on)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """When the stages of the last sync ran: "control" always, the others where kept."""
        return self._intervals

    def attach(self, replica: int = 0) -> None:
        """Attach a replica's workers again, now, after they were dropped or the server restarted.

        `send_weights` does it by itself for those that it knows to be missing. Only on rank 0.

        Raises:
            ClientError: as `init` does.
            TrainerStateError: as `send_weights` does.
        """
        with self._exclusively():
            self._driver(f"replica {replica} cannot be attached", replica).attach(replica)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of the job's replicas, attached or not; on rank 0, after `init`."""
        return () if self._job is None else self._job.replicas

    def add_replica(self, client: Client) -> int:
        """Attach one more deployment now; returns its number, which no other has had in this job.

        It takes part in the next `send_weights`. Only on rank 0, between syncs: the other ranks
        are not asked, and need not know. Raises as `init` and `attach` do; the job then goes on
        without it.
        """
        with self._exclusively():
            job = self._driver("no replica can be added")
            check_client(client, job.clients)
            return job.add_replica(client)

    def remove_replica(self, replica: int) -> None:
        """Detach a deployment; it is gone from the next `send_weights`, and from its report.

        Its workers keep the weights that they have; a server that does not answer is logged. Only
        on rank 0, between syncs. `TrainerStateError`, as of `attach`, also for the only replica.
        """
        with self._exclusively():
            job = self._driver(f"replica {replica} cannot be removed", replica)
            if len(job.replicas) == 1:
                raise TrainerStateError(
                    f"replica {replica} is the only one: expected another one to be left; call "
                    "add_replica() first, or close()"
                )
            job.remove_replica(replica)

    def close(self) -> None:
        """Detach the servers' workers, then end the job. Idempotent; problems are logged."""
        with self._exclusively(closing=True):
            self._closed = True
            if self._job is not None:
                self._job.close()

    @property
    def address(self) -> RendezvousAddress:
        """Where the job's rendezvous is, once `init` has begun; holds the job's token."""
        return self._hosting.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _describe(self) -> tuple[AdaptedSource, Manifest]:
        ranks = {"rank": self._rank, "num_producers": self._settings.num_producers}
        adapted = adapt(self._source, **ranks, exchange=self._exchange)
        return adapted, Manifest.build(adapted.params)

    def _driver(self, what: str, replica: int | None = None) -> Job:
        """The job of rank 0, whose rendezvous is there; with that replica, if one is given."""
        job, found = self._job, self.replicas
        if self._rank > 0 or job is None or not (replica is None or replica in found):
            raise TrainerStateError(
                f"{what}: expected rank 0, after init(), and one of its replicas {list(found)}"
            )
        if self._lost is not None:
            raise TrainerStateError(
                f"{what}: the rendezvous is gone: {self._lost}; close this trainer, make a new "
                "trainer"
            )
        return job

    @contextmanager
    def _exclusively(self, *, closing: bool = False) -> Generator[None]:
        if not self._in_use.acquire(blocking=False):
            raise TrainerStateError("another thread uses this trainer: expected one at a time")
        try:
            if self._closed and not closing:
                raise TrainerStateError("this trainer is closed: make a new one")
            yield
        finally:
            self._in_use.release()

    def _on_event(self, event: RendezvousEvent) -> None:
        """A push of the rendezvous, on its client's thread."""
        if isinstance(event, ConnectionLost):
            self._lost = event.reason
        if (sync := self._sync) is not None:
            sync.on_event(event)
