"""The inference worker: a Ray actor that holds one of vLLM's models and its weight transfer.

It answers the calls that vLLM's own Ray client and ours make, and does what vLLM's worker does for
each. Nothing but the engine's parts in the worker runs: no scheduler, no forward.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu.devices import bound, is_gpu, name_of, synchronize
from bench.gpu.models import MODELS, GpuModel, fill, vllm_config_of
from bench.gpu.recorded import chunk_facts, plan_facts, worker_intervals
from bench.stages import ChunkFacts, Interval

__all__ = ["GpuWorker"]


class GpuWorker:
    """Worker ``rank`` of ``size`` tensor-parallel ones, which meet in the file ``meeting``."""

    def __init__(
        self, kind: str, tiny: bool, device: str, rank: int = 0, size: int = 1, meeting: str = ""
    ) -> None:
        from vllm.config import set_current_vllm_config

        from rdt_vllm.plugin import register

        register()
        model = MODELS[kind].tiny() if tiny else MODELS[kind]
        self._shapes = model.shapes()
        self._device = bound(device)
        self._folder = tempfile.TemporaryDirectory(prefix="rdt-bench-")
        folder = Path(self._folder.name)
        self._config = vllm_config_of(model, folder, "rdt", device, rank, size)
        self._meeting = f"file://{meeting or folder / 'meeting'}"
        # Names the memory that workers on a CPU share, which stays when one is killed.
        os.environ["VLLM_DIST_IDENT"] = "-".join(Path(self._meeting).parts[-2:])
        self._active = lambda: set_current_vllm_config(self._config)
        self._model = self._build(model, device)
        self._engines: dict[str, Any] = {}
        self._engine: Any = None
        self._options: dict[str, Any] = {}
        self._calls: list[Interval] = []

    def _build(self, model: GpuModel, device: str) -> torch.nn.Module:
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )
        from vllm.model_executor.model_loader import get_model_loader

        with self._active():
            parallel = self._config.parallel_config
            rank, size = parallel.rank, parallel.world_size
            # Only loading runs here, which needs no collective but of the CPU.
            local_rank = self._device.index or 0
            backend = "nccl" if is_gpu(device) and size == 1 and not local_rank else "gloo"
            init_distributed_environment(size, rank, self._meeting, local_rank, backend)
            ensure_model_parallel_initialized(size, 1)
            # Its tracing decorator hides what it takes.
            load: Any = get_model_loader(self._config.load_config).load_model
            if device == "cpu":  # there is no cache to empty, and asking for it raises
                torch.accelerator.empty_cache = lambda: None
            return load(vllm_config=self._config, model_config=self._config.model_config)

    def describe(self) -> dict[str, str]:
        """What runs here."""
        import vllm

        device = name_of(self._device)
        return {"vllm": vllm.__version__, "torch": torch.__version__, "device": device}

    def use(self, backend: str, options: dict[str, Any]) -> None:
        """Make ``backend``'s engine the one that answers; ``options`` go into its init info."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if self._engine is not None:
            self._engine.shutdown()
        self._options = options
        self._engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self._config, self._device, self._model
        )

    # ---- the calls of a trainer --------------------------------------------------------------

    def init_weight_transfer_engine(self, request: Any) -> None:
        info = {**request.init_info, **self._options}
        with self._active():
            self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self._calls.clear()
        self._timed(self._engine.start_weight_update)

    def update_weights(self, request: Any) -> None:
        self._timed(lambda: self._engine.update_weights(request.update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._timed(self._engine.finish_weight_update)
        began = time.perf_counter()
        synchronize(str(self._device))  # what is enqueued is not there yet
        self._calls.append(Interval("post-process", -1, began, time.perf_counter()))

    def update_weight_version(self, weight_version: str) -> None:
        """Nothing here serves."""

    def shutdown_weight_transfer_engine(self) -> None:
        self._engine.shutdown()

    def _timed(self, call: Any) -> None:
        began = time.perf_counter()
        with self._active():
            call()
        self._calls.append(Interval("control", len(self._calls), began, time.perf_counter()))

    # ---- what the benchmark asks -------------------------------------------------------------

    def record(self, on: bool) -> None:
        """Record the stages of each sync from now on, or no more; our backend only."""
        self._engine.record_intervals(on)

    def trace(self) -> tuple[list[Interval], list[ChunkFacts]]:
        """What this worker recorded of the last sync, and its plan; our backend only."""
        kept = worker_intervals(self._engine.intervals)
        return [*kept, *self._calls], chunk_facts(self._engine.plan)

    def plan(self) -> dict[str, int]:
        """How many bytes of a sync go which way; our backend only."""
        return plan_facts(self._engine.plan)

    def num_wrong(self, version: int) -> tuple[int, int]:
        """(parameters that differ from what vLLM's own loader writes of that version, compared)."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        found = {name: each.detach().clone() for name, each in self._model.named_parameters()}
        weights = (
            (
                name,
                fill(torch.empty(shape, dtype=torch.bfloat16, device=self._device), name, version),
            )
            for name, shape in self._shapes.items()
        )
        for each in self._model.parameters():
            each.detach().zero_()  # what the loader leaves alone is not equal to itself
        load_weights: Any = self._model.load_weights
        with self._active():
            initialize_layerwise_reload(self._model)
            load_weights(weights)
            finalize_layerwise_reload(self._model, self._config.model_config)
        wrong = 0
        for name, expected in self._model.named_parameters():
            same = expected.numel() > 0 and torch.equal(_bits(found[name]), _bits(expected))
            wrong += not same
        return wrong, len(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
