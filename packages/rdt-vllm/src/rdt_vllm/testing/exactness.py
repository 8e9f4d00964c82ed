"""The half of an exactness check that runs inside every vLLM worker.

CPU vLLM packs linear weights after loading and leaves parameters of shape ``(0,)``, so comparing
the parameters that serve proves next to nothing there. The probe therefore looks twice: at what a
sync filled in, before post-processing (`ModuleSnapshots`), and at what comes out at the end, the
logits. Both are held against a second model of this worker (`FreshModel`).

Give it to vLLM as ``worker_extension_cls`` (`rdt_vllm.testing.report.PROBE`) and drive it through
`rdt_vllm.testing.report`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rdt_vllm._vllm import checkpoint_form
from rdt_vllm.link import traffic_of
from rdt_vllm.testing.bits import flip_byte
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.logits_tap import LogitsTap, compare_logits
from rdt_vllm.testing.module_snapshots import ModuleSnapshots
from rdt_vllm.testing.report import ProbeError, WorkerReport
from rdt_vllm.testing.tensor_comparison import compare_filled, compare_live

__all__ = ["ExactnessProbe", "answering"]


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A worker's method that answers ``{"value": ..., "error": ...}`` and never raises.

    vLLM's multiprocessing executor stops reading at the first worker that raises. What the others
    answered is then taken for their answer to the *next* call, and so on for ever.
    """

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args, **kwargs), "error": None}
        except Exception as error:
            return {"value": None, "error": f"{type(error).__name__}: {error}"}

    return answer


@dataclass
class _Check:
    """What one worker knows of the check in progress."""

    fresh: FreshModel
    report: WorkerReport
    live_model: nn.Module
    live_layers: dict[str, Any]
    taps: dict[str, LogitsTap] = field(default_factory=dict)


class ExactnessProbe:
    """Methods mixed into vLLM's worker; called by name, on the worker's main thread.

    The names begin with ``rdt_``: vLLM refuses an extension whose names its worker has. Only
    builtin types are returned; most methods answer as `answering` says, errors included.
    """

    rank: int
    device: Any
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    @answering
    def rdt_observe(self, on: bool = True) -> None:
        """Copy each module that a sync fills from now on, and forget earlier copies; or stop.

        Raises:
            ProbeError: the worker's weight transfer engine has no ``observe``.
        """
        engine = self.weight_transfer_engine
        if not hasattr(engine, "observe"):
            raise ProbeError(
                f"worker {self.rank} has no engine to observe (found {type(engine).__name__}): "
                'start vLLM with weight_transfer_config={"backend": "rdt"}'
            )
        snapshots = self._rdt_snapshots()
        snapshots.clear()
        engine.observe(snapshots.observe if on else None)

    @answering
    def rdt_compare_tensors(self, checkpoint: str, flip: str | None = None) -> None:
        """Load ``checkpoint`` into a second model and compare tensors; `rdt_report` has the result.

        Raises:
            ProbeError: graphs were captured, which would go on running the live model.
        """
        if not self.vllm_config.model_config.enforce_eager:
            raise ProbeError("an exactness check needs an engine started with enforce_eager=True")
        self._rdt_close()
        live = self.model_runner.get_model()
        fresh = FreshModel(self.vllm_config, self.device, checkpoint)
        if flip is not None:
            flip_byte(fresh.model.get_parameter(flip))
        snapshots = self._rdt_snapshots()
        filled = compare_filled(fresh.model, live, snapshots, checkpoint_form, fresh.left_alone)
        fresh.post_process()
        serving = compare_live(fresh.model, live)
        report = WorkerReport(
            worker=self.rank,
            modules_observed=snapshots.num_modules,
            bytes_unpacked=filled.bytes_expected,
            bytes_compared=filled.bytes_compared,
            live_bytes_compared=serving.bytes_compared,
            logits_bytes=0,
            logits_digest="",
            mismatches=(*filled.mismatches, *serving.mismatches),
        )
        layers = self.vllm_config.compilation_config.static_forward_context
        self.__dict__["_rdt_check"] = _Check(fresh, report, live, dict(layers))

    @answering
    def rdt_tensor_report(self) -> dict[str, Any]:
        """The `WorkerReport` of the tensors alone; the check ends with `rdt_release`."""
        return self._rdt_current().report.to_rpc()

    @answering
    def rdt_serve(self, model: str) -> None:
        """Let the engine run the ``"fresh"`` or the ``"live"`` model, and record its logits."""
        check = self._rdt_current()
        self._rdt_swap(check, model)
        tap = LogitsTap(self.model_runner.model)
        tap.attach()
        check.taps[model] = tap

    @answering
    def rdt_report(self) -> dict[str, Any]:
        """The `WorkerReport` of both comparisons, once both models have served."""
        check = self._rdt_current()
        if check.taps.keys() != {"fresh", "live"}:
            raise ProbeError(f"both models must have served, found {sorted(check.taps)}")
        live, fresh = check.taps["live"], check.taps["fresh"]
        mismatches = (*check.report.mismatches, *compare_logits(live, fresh))
        return replace(
            check.report,
            logits_bytes=live.num_bytes,
            logits_digest=live.digest(),
            mismatches=mismatches,
        ).to_rpc()

    @answering
    def rdt_release(self) -> None:
        """Let the live model serve, and drop the second one; nothing to do without a check."""
        self._rdt_close()

    @answering
    def rdt_torn(self) -> bool:
        """Whether the worker may hold a mixture of weights (`RdtWeightTransferEngine.torn`)."""
        return self.weight_transfer_engine.torn

    def rdt_traffic(self) -> dict[str, Any]:
        """What the last sync did: see `rdt_vllm.link.traffic_of`.

        Zeros until one has completed since the worker attached.
        """
        return getattr(self.weight_transfer_engine, "traffic", None) or traffic_of(None)

    def rdt_consumer(self) -> str:
        """Which consumer this worker is, as ``r0w1``; empty while it is detached."""
        return str(getattr(self.weight_transfer_engine, "consumer", None) or "")

    def _rdt_close(self) -> None:
        check = self.__dict__.get("_rdt_check")
        if check is not None:
            self._rdt_swap(check, "live")
            del self.__dict__["_rdt_check"]

    def _rdt_snapshots(self) -> ModuleSnapshots:
        return self.__dict__.setdefault("_rdt_module_snapshots", ModuleSnapshots())

    def _rdt_current(self) -> _Check:
        check = self.__dict__.get("_rdt_check")
        if check is None:
            raise ProbeError("no check is open: call rdt_compare_tensors first")
        return check

    def _rdt_swap(self, check: _Check, model: str) -> None:
        """Put a model, and the layers that its forward finds by name, where the runner looks."""
        for tap in check.taps.values():
            tap.detach()
        layers = self.vllm_config.compilation_config.static_forward_context
        if model == "live":
            self.model_runner.model = check.live_model
            layers.update(check.live_layers)
            return
        for name, layer in check.fresh.layers.items():
            _equip(layer, check.live_layers[name])
        self.model_runner.model = check.fresh.model
        layers.update(check.fresh.layers)


def _equip(layer: Any, live: Any) -> None:
    """Give a layer what vLLM gives its layers after loading: the cache, and what backends add."""
    given = {name: value for name, value in vars(live).items() if name not in vars(layer)}
    if "kv_cache" in vars(live):
        given["kv_cache"] = live.kv_cache
    vars(layer).update(given)
