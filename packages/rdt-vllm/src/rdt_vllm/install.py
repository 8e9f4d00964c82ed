"""The layerwise installer: chunks in, a model in kernel form out.

Two threads: one scatters a chunk's slices and so frees its receive slot, and computes what a
complete module computes from them; one post-processes the modules that are complete. Neither ever
waits for the other.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from rdt_bake import PlanReplay
from rdt_plan import Chunk, SyncPlan
from rdt_transport.events import Event, Events
from rdt_vllm import _vllm
from rdt_vllm.errors import InstallError, LifecycleError
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.ties import find_ties
from rdt_vllm.units import layerwise_units
from rdt_vllm.work_thread import WorkThread

__all__ = ["ChunkSink", "Installer", "Observer"]

Observer = Callable[[str, nn.Module], None]


class ChunkSink(Protocol):
    """Whom the installer answers; `rdt_transport.consumer.Consumer` is one. Any thread."""

    def scattered(self, index: int, event: Event) -> None:
        """Chunk ``index``'s slot is read by work that ``event`` follows."""
        ...

    def scatter_failed(self, index: int, error: BaseException) -> None:
        """Chunk ``index`` could not be, or will not be, installed."""
        ...

    def fail(self, error: BaseException) -> None:
        """The whole sync cannot succeed."""
        ...


class Installer:
    """Installs the syncs of one plan into one model.

    `begin`, `finish`, `abandon`, `close` and `observe` are called by the worker's thread, `install`
    by whoever receives chunks. Between `begin` and `finish` no forward may run.

    Args:
        model: the worker's model, in kernel form.
        plan: what each sync brings.
        vllm_config: post-processing may consult it.
        events: marks behind device work, for slot reuse.

    Attributes:
        touched: a sync has changed the model, and none has been finished since.

    Raises:
        UnsupportedError: the plan writes into a module that cannot be post-processed by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SyncPlan,
        *,
        vllm_config: _vllm.VllmConfig,
        events: Events,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._events = events
        self._replay = PlanReplay(plan, self._destination)
        self._units = layerwise_units(model, plan, find_ties(model))
        last: dict[int, int] = {}
        for chunk in plan.chunks:
            last.update((id(self._units[path]), chunk.index) for path in chunk.complete)
        self._complete: dict[int, list[LayerwiseUnit]] = {}
        for unit in dict.fromkeys(self._units.values()):
            self._complete.setdefault(last.get(id(unit), -1), []).append(unit)
        self._observer: Observer | None = None
        self._sink: ChunkSink | None = None
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        self._scattering = WorkThread("rdt-scatter", self._scatter)
        self._processing = WorkThread("rdt-post-process", self._post_process)
        self.touched = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted paths of all modules that a sync replaces."""
        return tuple(path for unit in dict.fromkeys(self._units.values()) for path in unit.modules)

    def observe(self, observer: Observer | None) -> None:
        """Show ``observer`` each module, with its path, that is filled but not post-processed yet.

        It is called on the post-processing thread and may read the module's tensors, among them
        those that are written where they live; an exception fails the sync. None ends it.
        """
        self._observer = observer

    def begin(self, sink: ChunkSink) -> None:
        """Open a sync; raises `LifecycleError` while one is open."""
        if self._sink is not None:
            raise LifecycleError("an install is already open; finish or abandon it first")
        self._sink = sink
        self._error = None

    def install(self, chunk: Chunk, packed: torch.Tensor) -> None:
        """Queue a chunk with its packed bytes (uint8, 1-D), valid until the sink is answered."""
        self._scattering.put((chunk, packed))

    def drain(self, timeout_seconds: float) -> None:
        """Wait until everything queued is installed.

        Raises the first error of a background thread, or `ThreadTimeoutError`.
        """
        self._scattering.drain(timeout_seconds)
        self._processing.drain(timeout_seconds)
        if self._error is not None:
            raise self._error

    def finish(self, timeout_seconds: float) -> None:
        """Wait until everything queued is installed, then process what depends on other modules.

        All chunks must have been queued. Raises as `drain` does, and `InstallError` naming the
        attention that could not be processed; call `abandon` then.
        """
        self.drain(timeout_seconds)
        for unit in self._complete.get(-1, ()):  # nothing is read for these
            self._processing.put(unit)
        self.drain(timeout_seconds)
        with torch.no_grad(), self._context():
            for path, module in self._model.named_modules():
                if _vllm.is_deferred(module):
                    try:
                        _vllm.post_process_deferred(module, self._vllm_config)
                    except Exception as error:
                        raise InstallError(f"{path}: post-processing failed: {error}") from error
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
        self._scattering.drain(timeout_seconds)
        self._processing.drain(timeout_seconds)
        self._replay.abandon()
        for unit in dict.fromkeys(self._units.values()):
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
        sink = self._sink
        if sink is None:
            return  # late: the sync was given up
        if self._error is not None:
            sink.scatter_failed(chunk.index, self._error)
            return
        try:
            self.touched = True
            with torch.no_grad():
                for path in chunk.materialize:
                    self._open(self._units[path])
                self._replay.place(chunk, packed)
            event = self._events.record()
        except BaseException as error:
            wrapped = _wrapped(f"chunk {chunk.index} could not be installed", error)
            sink.scatter_failed(chunk.index, self._fail(wrapped))
            return
        sink.scattered(chunk.index, event)  # programs compute from copies of what it brought
        for unit in self._complete.get(chunk.index, ()):
            try:
                self._compute(unit)
                self._processing.put(unit)
            except BaseException as error:
                self._fail(_wrapped(f"computing {', '.join(unit.modules)} failed", error))

    def _open(self, unit: LayerwiseUnit) -> None:
        if unit.is_open:
            return  # opened by the first chunk of a module it is tied to
        unit.open()
        for path in unit.modules:
            self._replay.open(path)

    def _compute(self, unit: LayerwiseUnit) -> None:
        for path in unit.modules:
            self._replay.compute(path)

    def _destination(self, path: str, name: str) -> torch.Tensor:
        return self._units[path].destination(path, name)

    def _post_process(self, unit: LayerwiseUnit) -> None:
        if self._error is not None:
            return
        try:
            with torch.no_grad(), self._context():
                self.touched = True
                if not unit.is_open:  # nothing is read for it
                    self._open(unit)
                    self._compute(unit)
                observer = self._observer
                if observer is not None:
                    for path, module in unit.modules.items():
                        observer(path, module)
                unit.close()
        except BaseException as error:
            self._fail(_wrapped(f"post-processing of {', '.join(unit.modules)} failed", error))

    # ---- any thread ------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> BaseException:
        """Keep the first error, and tell the sink; returns the one that is kept."""
        with self._error_lock:
            first = self._error is None
            kept = self._error = self._error or error
        sink = self._sink
        if first and sink is not None:
            sink.fail(kept)
        return kept

    def _context(self) -> AbstractContextManager[None]:
        return _vllm.active_config(self._vllm_config)


def _wrapped(what: str, error: BaseException) -> InstallError:
    wrapped = InstallError(f"{what}: {error}")
    wrapped.__cause__ = error
    return wrapped
