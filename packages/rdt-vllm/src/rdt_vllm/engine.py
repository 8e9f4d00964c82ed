"""The worker's side of a sync, as vLLM drives it: init, start, update, finish, shutdown."""

import logging
import time
from typing import Any

import torch

import rdt_bake
from rdt_plan import ConsumerId, Manifest, SyncPlan
from rdt_plan.collector import collector_paused
from rdt_transport.errors import RdtTransportError
from rdt_transport.events import events_of
from rdt_transport.intervals import Intervals
from rdt_transport.rendezvous import RendezvousAddress
from rdt_vllm import _vllm
from rdt_vllm.errors import LifecycleError, RdtVllmError, WorkerTornError
from rdt_vllm.infos import RdtInitInfo, RdtUpdateInfo
from rdt_vllm.install import Installer, Observer
from rdt_vllm.link import JobLink, traffic_of
from rdt_vllm.probe import Probe
from rdt_vllm.recording import record_model
from rdt_vllm.refusals import check_supported
from rdt_vllm.worker_plan import WorkerPlan

__all__ = ["RdtWeightTransferEngine"]

_logger = logging.getLogger("rdt_vllm")

CLOSE_TIMEOUT_SECONDS = 30.0


class RdtWeightTransferEngine(_vllm.WeightTransferEngine[RdtInitInfo, RdtUpdateInfo]):
    """Pulls the slices this worker consumes and installs them, live or layer by layer.

    vLLM calls it on the worker's main thread. Errors of background threads are raised by the next
    of `update_weights`, `drain_pending` and `finish_weight_update`; the worker may then be `torn`,
    every later call of that update raises `WorkerTornError`, and the next complete update, from
    `start_weight_update` on, heals it.
    """

    init_info_cls = RdtInitInfo
    update_info_cls = RdtUpdateInfo
    supports_draft_weight_update = False  # its plan is that of one concrete model
    defers_processing = True
    gives_up_open_updates = True  # so vLLM's worker may end one (`rdt_vllm.amendments`)

    def __init__(
        self,
        config: _vllm.WeightTransferConfig,
        vllm_config: _vllm.VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.torn = False
        self.installer: Installer | None = None
        self._observer: Observer | None = None
        self._link: JobLink | None = None
        self._recordings: dict[tuple[str, ...], rdt_bake.Recording] = {}  # the last one
        self._probe = Probe(model, vllm_config)
        self._timeout_seconds = RdtInitInfo.timeout_seconds
        self._open = False  # between start and finish
        self._epoch: int | None = None  # the one that update_weights started
        self._error: BaseException | None = None  # why the open update cannot succeed
        self._started = 0.0

    # ---- once a job --------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: RdtInitInfo) -> None:
        """Attach to a job: record the loaders, plan, connect. Again for the same job: anew.

        An update that is open is given up, unless this call is refused before it detaches.

        Raises:
            UnsupportedError: this engine cannot be synced correctly.
            VllmVersionError: this vLLM is not one we know.
            InitInfoError: a field of ``init_info`` is wrong.
            LifecycleError: an earlier attachment is still at work on the model.
            AttachedElsewhereError: another trainer is attached and alive.
            RdtTransportError, RdtBakeError, RdtPlanError: the rendezvous, the loaders or the plan.
        """
        started = time.perf_counter()
        address = RendezvousAddress.from_init_info(vars(init_info))
        if self._link is not None:
            self._link.check_free(address)
        _vllm.check_version()
        _vllm.amend_worker()
        check_supported(_vllm.engine_facts(self.vllm_config, self.model))
        consumer, num_workers = init_info.identity(self.parallel_config)
        self.shutdown()
        if self.installer is not None:
            raise LifecycleError(
                "an earlier attachment, its threads or its reads, is still at work on this "
                "worker's model: initialise again later, or restart the worker"
            )
        self._timeout_seconds = init_info.timeout_seconds
        name = f"rdt-{consumer}"
        link = JobLink(
            address,
            lambda: init_info.make_wire(name, self.device.type),
            name=name,
            device=self.device,
            timeout_seconds=init_info.timeout_seconds,
        )
        try:
            with collector_paused(stays=True):  # and it is a good part of the heap
                manifest = link.manifest()
                recording = self._record(manifest, init_info)
                planned = WorkerPlan.build(
                    self.model,
                    recording,
                    manifest,
                    link.job,
                    consumer,
                    num_workers,
                    probe=self._probe if init_info.live else None,
                    direct=init_info.direct and not _vllm.may_sleep(self.vllm_config),
                )
                self.installer = Installer(
                    self.model,
                    planned.plan,
                    planned.units,
                    vllm_config=self.vllm_config,
                    events=events_of(self.device),
                )
                self.installer.observe(self._observer)
                link.attach(planned.plan, num_workers, self.installer.install, planned.destination)
        except BaseException:
            link.close()
            self.installer = None
            raise
        self._link = link
        spent = time.perf_counter() - started
        _logger.info("consumer %s attached to job %s, %.2f s", consumer, address.job, spent)

    @property
    def consumer_incarnation(self) -> str:
        """32 hex digits that name this attachment at the rendezvous; empty while detached."""
        return "" if self._link is None else self._link.consumer.incarnation.hex()

    @property
    def consumer(self) -> ConsumerId | None:
        """Which consumer this worker is; None while detached."""
        return None if self._link is None else self._link.consumer.plan.consumer

    @property
    def plan(self) -> SyncPlan:
        """What each sync pulls; raises `LifecycleError` while detached."""
        return self._attached()[0].consumer.plan

    def record_intervals(self, on: bool) -> None:
        """Keep when the stages of each sync run, from now on, or no more; else as `plan`."""
        self._attached()[0].consumer.record_intervals(on)

    @property
    def intervals(self) -> Intervals | None:
        """Those of the last sync; None when they were not kept."""
        return None if self._link is None else self._link.consumer.intervals

    @property
    def traffic(self) -> dict[str, Any]:
        """What the last complete sync since the worker attached did: see `traffic_of`."""
        return traffic_of(None) if self._link is None else self._link.traffic

    def observe(self, observer: Observer | None) -> None:
        """Show ``observer`` what syncs fill in, of later jobs as well; see `Installer.observe`."""
        self._observer = observer
        if self.installer is not None:
            self.installer.observe(observer)

    def _record(self, manifest: Manifest, info: RdtInitInfo) -> rdt_bake.Recording:
        if (key := (manifest.digest, *info.unconsumed)) not in self._recordings:
            found = record_model(self.model, manifest.params, self.vllm_config, info.unconsumed)
            self._recordings = {key: found}
        return self._recordings[key]

    # ---- every sync --------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Open an update; the engine must be paused with no forward in flight until it ends."""
        link, installer = self._attached()
        link.consumer.expect()
        if self._open:
            self._give_up(LifecycleError("a new update began before this one was finished"))
        elif self._error is not None:  # the installer's threads may have been late
            installer.abandon(self._error, self._timeout_seconds)
        self._started = time.perf_counter()
        self._open = True
        self._epoch = self._error = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin pulling one epoch; returns when the reads are under way, without a device sync."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RdtUpdateInfo) -> None:
        """`update_weights` with its fields parsed."""
        link, installer = self._opened()
        try:
            if self._epoch is not None:
                raise LifecycleError(
                    f"epoch {self._epoch} is being pulled: one update_weights per update"
                )
            installer.begin(link.consumer, update_info.checksums)
            link.start(update_info.session, update_info.epoch, update_info.record)
            if link.consumer.plan.direct_bytes:  # some reads land in the model itself
                installer.touched = True
            self._epoch = update_info.epoch
            installer.intervals = link.consumer.intervals
        except BaseException as error:
            self._give_up(error)
            raise

    def drain_pending(self) -> None:
        """Block until all that was queued is installed; idempotent."""
        if self._error is None and self._epoch is None:
            return
        link, installer = self._opened()
        try:
            link.wait()
            installer.drain(self._timeout_seconds)
        except BaseException as error:
            self._give_up(error)
            raise

    def finish_weight_update(self) -> None:
        """Drain, process what depends on other modules, commit. An update without an epoch ends."""
        link, installer = self._opened()
        if self._epoch is None:
            self._open = False
            return
        try:
            stats = link.wait()
            installer.finish(self._timeout_seconds)
            self.torn = True  # new weights, which the others may not have
            link.commit()
        except BaseException as error:
            self._give_up(error)
            raise
        self._open = False
        self.torn = False
        _logger.info(
            "epoch %d installed: %d chunks, %d bytes direct and %d staged, %.3f s",
            stats.epoch,
            stats.num_chunks,
            stats.bytes_direct,
            stats.bytes_staged,
            time.perf_counter() - self._started,
        )
        self._epoch = None

    def _opened(self) -> tuple[JobLink, Installer]:
        if self._error is not None:
            raise WorkerTornError(
                f"this update failed ({self._error}) and the worker "
                f"{'holds a mixture of weights' if self.torn else 'keeps its weights'}: start a "
                "new update"
            ) from self._error
        if self._link is not None and not self._open:
            raise LifecycleError("start_weight_update has not been called: call it first")
        return self._attached()

    def _attached(self) -> tuple[JobLink, Installer]:
        if self._link is None or self.installer is None:
            raise LifecycleError("init_weight_transfer_engine has not succeeded: call it first")
        return self._link, self.installer

    def _give_up(self, error: BaseException) -> None:
        """End the open update after ``error``: a whole model, of perhaps mixed values."""
        assert self._link is not None and self.installer is not None
        self._error = error
        self._open = False
        epoch, self._epoch = self._epoch, None
        was_torn, self.torn = self.torn, True  # unless the installer can tell
        try:
            if epoch is not None:
                self._link.give_up(epoch, error)
        finally:
            self.installer.abandon(error, self._timeout_seconds)
            self.torn = was_torn or self.installer.touched

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Detach from the job; the worker goes on serving. Idempotent, never raises."""
        link = self._link
        try:
            if self._open:
                self._give_up(LifecycleError("the weight transfer was shut down in an update"))
        except (RdtTransportError, RdtVllmError) as error:
            _logger.warning("shutting the weight transfer down: %s", error)
        if link is not None and not link.close():
            return  # kept: its reads may still land in the model
        try:
            if self.installer is not None:
                self.installer.close(CLOSE_TIMEOUT_SECONDS)
            self.installer = None
        except RdtVllmError as error:  # kept: its threads still write into the model
            _logger.warning("shutting the weight transfer down: %s", error)
        self._link = self._epoch = self._error = None
