"""The trainer: a Ray actor with one GPU's weights, which drives a worker through each sync."""

import time
from functools import cached_property
from typing import Any

import torch

from bench.gpu.devices import bound, synchronize
from bench.gpu.models import MODELS, fill, modules_of
from bench.gpu.ways import SOURCES
from bench.stages import Interval
from rdt_trainer import Client, RayClient, RdtTrainer
from rdt_transport import JobSettings

__all__ = ["GpuTrainer"]

INIT_SECONDS = 150.0


class GpuTrainer:
    """Holds the checkpoint's tensors, each for itself, as a trainer's parameters are."""

    _rank = 0  # of its process group

    def __init__(self, kind: str, tiny: bool, device: str) -> None:
        model = MODELS[kind].tiny() if tiny else MODELS[kind]
        self._device = device
        bound(device)
        self._module = modules_of(model.shapes(), device)
        self._sender: Any = None
        self._is_ours = False

    @cached_property
    def _weights(self) -> dict[str, Any]:
        return {name: each.detach() for name, each in self._module.named_parameters()}

    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(each.numel() * each.element_size() for each in self._weights.values())

    def set_version(self, version: int) -> None:
        """New weights, finished when this returns."""
        for name, tensor in self._weights.items():
            fill(tensor, name, version)
        self._synchronize()

    def use_rdt(self, workers: list[Any], settings: JobSettings, source: str) -> float:
        """Attach a deployment's workers to a trainer of ours; returns the seconds it took.

        ``source``: one of `bench.gpu.ways.SOURCES`.
        """
        return self.attach(RayClient(workers), settings, source)

    def attach(self, client: Client, settings: JobSettings, source: str) -> float:
        """As `use_rdt`, whatever ``client`` drives."""
        self._end()
        began = time.perf_counter()
        self._is_ours = True
        self._sender = RdtTrainer(
            SOURCES[source](self._module),
            None if self._rank else client,
            rank=self._rank,
            settings=settings,
            device=self._device,
            timeout_seconds=INIT_SECONDS,
        )
        self._sender.init()
        return time.perf_counter() - began

    def use_vllm(self, worker: Any, backend: str, namespace: str, packed: bool = False) -> float:
        """Attach ``worker`` to a trainer of vLLM's; returns the seconds it took."""
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._end()
        began = time.perf_counter()
        if backend == "sharded_rdt":
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import (
                ShardedRDTTrainerInitInfo,
            )

            info: Any = ShardedRDTTrainerInitInfo(
                rank=0, num_consumers=1, trainer_actor_namespace=namespace
            )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=0, packed=packed)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            info, client=RayVLLMWeightSyncClient(worker), source=self._source()
        )
        self._is_ours = False
        return time.perf_counter() - began

    def _source(self) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        weights = self._weights
        source: Any = WeightSource  # of vLLM 0.33, which has a peer to measure

        class Weights(source):
            @cached_property
            def metadata(self) -> list[Any]:
                return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in weights.items()]

            def iter_full(self) -> Any:
                return iter(weights.items())

        return Weights()

    def _end(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            (sender.close if self._is_ours else sender.shutdown)()

    def end(self) -> None:
        """Detach the worker."""
        self._end()

    def sync(self) -> tuple[float, float]:
        """One sync, first call to last: (start, end) of a clock that all processes share."""
        self._synchronize()
        began = time.perf_counter()
        self._sender.send_weights()
        return began, time.perf_counter()

    def record(self, on: bool) -> None:
        """Record the stages of each sync from now on, or no more; ours only."""
        self._sender.record_intervals(on)

    def intervals(self) -> list[Interval]:
        """What the trainer recorded of the last sync."""
        return [Interval(*each) for each in self._sender.intervals]

    def device_copy_seconds(self, num_bytes: int, to: str) -> float:
        """The median of one copy of that many bytes to a device."""
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source, device=to)
        seconds = []
        for _ in range(13):
            self._synchronize()
            began = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            synchronize(to)
            seconds.append(time.perf_counter() - began)
        return sorted(seconds[3:])[5]

    def _synchronize(self) -> None:
        synchronize(self._device)
