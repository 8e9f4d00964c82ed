"""The installer: chunks in, a model in kernel form out.

Two threads, each on its own stream: one scatters a chunk's slices, which frees its receive slot,
and computes what a complete module computes from them; one post-processes the modules that are
complete, but for live ones. Neither ever waits for the other. Direct chunks never get here.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rdt_bake import PlanReplay
from rdt_plan import Chunk, SyncPlan
from rdt_transport.events import Event, Events
from rdt_transport.intervals import Intervals
from rdt_vllm import _vllm
from rdt_vllm.chunk_sink import ChunkSink
from rdt_vllm.completion import Completion
from rdt_vllm.deferred import DeferredModules
from rdt_vllm.errors import InstallError, LifecycleError
from rdt_vllm.model_hook import run_model_hook
from rdt_vllm.module_tensors import copy_all
from rdt_vllm.retired import Retired
from rdt_vllm.scatter import ChunkScatter
from rdt_vllm.units import InstallUnit, InstallUnits
from rdt_vllm.verification import Verification
from rdt_vllm.work_thread import WorkThread

__all__ = ["Installer", "Observer"]

Observer = Callable[[str, nn.Module], None]


class Installer:
    """Installs the syncs of one plan into one model.

    `begin`, `finish`, `abandon`, `close` and `observe` are called by the worker's thread, `install`
    by whoever receives chunks. Between `begin` and `finish` no forward may run.

    Args:
        model: the worker's model, in kernel form.
        plan: what each sync brings.
        units: how its modules are installed.
        vllm_config: post-processing may consult it.
        events: marks behind device work, and the threads' streams.

    Attributes:
        touched: a sync has changed the model, or may have, and none has been finished since. Who
            lets direct chunks be read sets it.
        intervals: keeps when the post-processing thread was at work on a chunk's modules, if given.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SyncPlan,
        units: InstallUnits,
        *,
        vllm_config: _vllm.VllmConfig,
        events: Events,
    ) -> None:
        self._model = model
        self._plan = plan
        self._vllm_config = vllm_config
        self._events = events
        self._units = units
        self._replay = PlanReplay(plan, self._destination)
        self._deferred = DeferredModules(model, units.of.keys(), vllm_config)
        self._scatters: dict[int, ChunkScatter] = {}
        for chunk in filter(lambda each: not each.is_direct, plan.chunks):
            scatter = ChunkScatter(chunk, self._replay, self._destination, events.device)
            self._scatters[chunk.index] = scatter
        self._completion = Completion(plan, units)
        self._live = [unit for unit in units.all if unit.is_live]
        self._observer: Observer | None = None
        self._sink: ChunkSink | None = None
        self._verification: Verification | None = None
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        begin = events.bind_with_stream
        self._scattering = WorkThread("rdt-scatter", self._scatter, begin)
        self._processing = WorkThread("rdt-post-process", self._post_process, begin)
        self._enqueued: dict[str, Event] = {}  # by thread, the mark behind all it has done
        self._retired = Retired()  # what was filled, and is post-processed
        self.touched = False
        self.intervals: Intervals | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted paths of all modules that a sync replaces."""
        return tuple(path for unit in self._units.all for path in unit.modules)

    def observe(self, observer: Observer | None) -> None:
        """Show ``observer`` each module, with its path, that is filled but not post-processed yet.

        It may read the module's tensors, on the current stream; an exception fails the sync. It is
        called on the post-processing thread, and for live modules, which are never post-processed,
        by `finish`. None ends it.
        """
        self._observer = observer

    def begin(self, sink: ChunkSink, checksums: Mapping[str, Any] | None = None) -> None:
        """Open a sync, which `finish` verifies where ``checksums`` are given: see `Verification`.

        Raises `LifecycleError` while one is open, and `InitInfoError` for wrong checksums.
        """
        if self._sink is not None:
            raise LifecycleError("an install is already open; finish or abandon it first")
        self._verification = None if checksums is None else Verification(self._plan, checksums)
        self._completion.begin()
        self._sink = sink
        self._error = None

    def install(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Queue a chunk with its packed bytes (uint8, 1-D), valid until the sink is answered."""
        self._scattering.put((chunk, packed))

    def drain(self, timeout_seconds: float) -> None:
        """Wait for everything queued; the caller's stream waits for the device. Raises the first
        error of a background thread, or `ThreadTimeoutError`."""
        self._drain(timeout_seconds)
        if self._error is not None:
            raise self._error

    def finish(self, timeout_seconds: float) -> None:
        """Wait until everything queued is installed, then process what depends on other modules.

        All chunks must have been queued. Raises as `drain` does, `VerificationError`, and
        `InstallError` naming the attention or model's hook that cannot be run; `abandon` it then.
        """
        self.drain(timeout_seconds)
        unread = self._completion.unread
        if unread:
            self._processing.put((unread, self._events.record()))
            self.drain(timeout_seconds)
        for unit in self._live if self._observer or self._verification else ():
            try:
                self._observe(unit)
            except Exception as error:
                what = f"observing {', '.join(unit.modules)} failed"
                raise InstallError.of(what, error) from error
        self._deferred.process()
        try:
            with torch.no_grad(), _vllm.active_config(self._vllm_config):
                run_model_hook(self._model)
        except Exception as error:
            raise InstallError(f"the model's own post-processing failed: {error}") from error
        if self._verification is not None:
            self._verification.finish()
        self._sink = None
        self.touched = False

    def abandon(self, error: BaseException, timeout_seconds: float) -> None:
        """Give the open sync up: queued chunks are discarded, all modules are in kernel form again.

        Their values may be a mixture of old and new ones. The caller stops the chunks. Idempotent.
        """
        if self._sink is None:
            return
        with self._error_lock:
            self._error = self._error or error
        self._drain(timeout_seconds)
        self._replay.abandon()
        for unit in self._units.all:
            unit.abandon()
        self._sink = None

    def close(self, timeout_seconds: float) -> None:
        """End both threads; idempotent."""
        self.abandon(InstallError("the installer closes"), timeout_seconds)
        self._scattering.close(timeout_seconds)
        self._processing.close(timeout_seconds)

    # ---- background threads ----------------------------------------------------------------

    def _scatter(self, item: tuple[Chunk, torch.Tensor]) -> None:
        chunk, packed = item
        if (sink := self._sink) is None:
            return  # late: the sync was given up
        if self._error is not None:
            sink.scatter_failed(chunk.index, self._error)
            return
        with torch.no_grad(), self._events.stream():
            try:
                self._retired.let_go()
                self.touched = True
                for path in chunk.materialize:
                    self._open(self._units.of[path])
                self._scatters[chunk.index].run(packed)
                if self._verification is not None:
                    self._verification.arrived(chunk, packed)
                event = self._enqueued["scatter"] = self._events.record()
            except BaseException as error:
                wrapped = InstallError.of(f"chunk {chunk.index} could not be installed", error)
                sink.scatter_failed(chunk.index, self._fail(wrapped))
                return
            sink.scattered(chunk.index, event)  # programs compute from copies of what it brought
            self._hand_on(self._completion.scattered(chunk))

    def _hand_on(self, units: Sequence[InstallUnit]) -> None:
        """Compute what is left of units that are complete, and have them post-processed."""
        if not units:
            return
        try:
            try:
                for unit in units:
                    self._compute(unit)
                    if unit.is_live:
                        unit.close()
            finally:
                event = self._enqueued["scatter"] = self._events.record()
            if waiting := [unit for unit in units if not unit.is_live]:
                self._processing.put((waiting, event))
        except BaseException as error:
            self._fail(error)

    def _open(self, unit: InstallUnit) -> None:
        if unit.is_open:
            return  # opened by the first chunk of a module it is tied to
        unit.open()
        for path in unit.modules:
            self._replay.open(path)

    def _compute(self, unit: InstallUnit) -> None:
        for path in unit.modules:
            try:
                self._replay.compute(path)
            except Exception as error:
                raise InstallError.of(f"computing {path} failed", error) from error

    def _destination(self, path: str, name: str) -> torch.Tensor:
        return self._units.of[path].destination(path, name)

    def _post_process(self, item: tuple[Sequence[InstallUnit], Event]) -> None:
        units, scattered = item
        if self._error is not None:
            return
        began = time.perf_counter()
        try:
            with torch.no_grad(), self._events.stream(), _vllm.active_config(self._vllm_config):
                self._events.wait(scattered)
                self.touched = True
                filled: list[torch.Tensor] = []
                try:
                    copy_all([each for unit in units for each in self._processed(unit, filled)])
                    for unit in units:
                        unit.close()
                finally:
                    event = self._enqueued["post-process"] = self._events.record()
                    self._retired.add(filled, event)
            if self.intervals is not None:
                self.intervals.add("post-process", -1, began)
        except BaseException as error:
            named = isinstance(error, InstallError)
            self._fail(error if named else InstallError.of("post-processing failed", error))

    def _processed(
        self, unit: InstallUnit, filled: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `LayerwiseUnit.processed`; adds what the unit was given to ``filled``."""
        try:
            if not unit.is_open:  # nothing is read for it
                self._open(unit)
                self._compute(unit)
            filled += unit.given()
            if not unit.is_live:
                self._observe(unit)
            return unit.processed()
        except Exception as error:
            what = f"post-processing of {', '.join(unit.modules)} failed"
            raise InstallError.of(what, error) from error

    # ---- any thread ------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> BaseException:
        """Keep the first error, and tell the sink; returns the one that is kept."""
        with self._error_lock:
            first = self._error is None
            kept = self._error = self._error or error
        if first and (sink := self._sink) is not None:
            sink.fail(kept)
        return kept

    def _drain(self, timeout_seconds: float) -> None:
        self._scattering.drain(timeout_seconds)
        self._processing.drain(timeout_seconds)
        for event in self._enqueued.values():
            self._events.wait(event)
        self._retired.end()

    def _observe(self, unit: InstallUnit) -> None:
        verify = None if self._verification is None else self._verification.filled
        for observer in filter(None, (self._observer, verify)):
            for path, module in unit.modules.items():
                observer(path, module)
