"""A served model beside its installer, without an engine: chunks are packed from a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import rdt_bake
from rdt_plan import Chunk, ConsumerId, Manifest, ParamMeta, SyncPlan, build_plan, group_ordered
from rdt_plan.direct import DirectRule
from rdt_transport.events import Event, HostEvents
from rdt_vllm._vllm import VllmConfig, checkpoint_form
from rdt_vllm.install import Installer
from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.probe import Probe
from rdt_vllm.recording import record_model
from rdt_vllm.testing.fresh_model import FreshModel
from rdt_vllm.testing.module_snapshots import ModuleSnapshots
from rdt_vllm.testing.tensor_comparison import compare_filled, compare_live
from rdt_vllm.units import InstallUnits

__all__ = ["Answers", "InstallWorker", "addresses", "pack_chunk", "structure"]

TIMEOUT_SECONDS = 60.0


class Answers:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.scattered_chunks: list[int] = []
        self.failed_chunks: list[int] = []
        self.errors: list[BaseException] = []

    def scattered(self, index: int, event: Event) -> None:
        assert event.query()
        self.scattered_chunks.append(index)

    def scatter_failed(self, index: int, error: BaseException) -> None:
        self.failed_chunks.append(index)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


class InstallWorker:
    """A served model and the means to sync it, with an in-memory transport.

    ``live`` lets modules be live, ``direct`` has what can be read into them directly.
    """

    def __init__(
        self,
        config: VllmConfig,
        folder: Path,
        *,
        num_slots: int = 2,
        max_chunk_bytes: int = 1 << 16,
        live: bool = True,
        direct: bool = False,
    ) -> None:
        self.config = config
        fresh = FreshModel(config, torch.device("cpu"), str(folder))
        fresh.post_process()
        self.model = fresh.model
        weights = load_file(folder / "model.safetensors")
        params = tuple(
            ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in weights.items()
        )
        self.manifest = Manifest.build(_ordered(params))
        self.recording = record_model(self.model, self.manifest.params, config)
        probe = Probe(self.model, config) if live else None
        self.units = InstallUnits(self.model, self.recording, probe)
        names = frozenset(param.name for param in params if direct)
        self.plan: SyncPlan = build_plan(
            self.manifest,
            self.recording.writes,
            ConsumerId(0, 0),
            num_workers=1,
            num_slots=num_slots,
            max_chunk_bytes=max_chunk_bytes,
            programs=self.recording.programs,
            direct=DirectRule({0: names}, frozenset(self.units.live_tensors())),
        )
        self.installer = self.install(self.plan)
        self.snapshots = ModuleSnapshots()
        self.installer.observe(self.snapshots.observe)

    def install(self, plan: SyncPlan) -> Installer:
        return Installer(self.model, plan, self.units, vllm_config=self.config, events=HostEvents())

    def queue(self, weights: Mapping[str, torch.Tensor], corrupt: int | None = None) -> Answers:
        answers = Answers()
        self.installer.begin(answers)
        for chunk in self.plan.chunks:
            if chunk.is_direct:
                self._read(chunk, weights)
                continue
            packed = pack_chunk(chunk, weights)
            self.installer.install(chunk, packed[:-1] if chunk.index == corrupt else packed)
        return answers

    def _read(self, chunk: Chunk, weights: Mapping[str, torch.Tensor]) -> None:
        """What a READ of a direct chunk does."""
        for placement in chunk.placements:
            destination = self.units.live_tensors()[placement.module, placement.param]
            values = rdt_bake.read_slice(weights[placement.slice.name], placement.slice)
            rdt_bake.apply_placement(placement, values.view(-1).view(torch.uint8), destination)

    def sync(self, folder: Path) -> Answers:
        self.snapshots.clear()
        answers = self.queue(load_file(folder / "model.safetensors"))
        self.installer.finish(TIMEOUT_SECONDS)
        return answers

    def differences(self, folder: Path) -> list[str]:
        """What differs from a model that loaded ``folder`` with vLLM's own loaders."""
        fresh = FreshModel(self.config, torch.device("cpu"), str(folder))
        filled = compare_filled(fresh.model, self.model, self.snapshots, checkpoint_form)
        assert filled.bytes_compared == filled.bytes_expected or filled.mismatches
        fresh.post_process()
        live = compare_live(fresh.model, self.model)
        found = [str(mismatch) for mismatch in (*filled.mismatches, *live.mismatches)]
        return found + _different_outputs(fresh.model, self.model)


def _ordered(params: tuple[ParamMeta, ...]) -> list[ParamMeta]:
    by_name = {param.name: param for param in params}
    return [by_name[name] for name in group_ordered(list(by_name))]


def pack_chunk(chunk: Chunk, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    packed = torch.zeros(chunk.serve.num_bytes, dtype=torch.uint8)
    for region, offset in zip(chunk.serve.slices, chunk.serve.offsets, strict=True):
        values = rdt_bake.read_slice(weights[region.name], region).contiguous()
        packed[offset : offset + region.num_bytes] = values.view(-1).view(torch.uint8)
    return packed


def _different_outputs(expected: nn.Module, found: nn.Module) -> list[str]:
    """Linear layers and heads whose packed form computes something else than ``expected``'s."""
    others: dict[str, Any] = dict(found.named_modules())
    names = []
    module: Any
    for name, module in expected.named_modules():
        if hasattr(module, "cpu_linear") and getattr(module, "quant_method", None) is not None:
            sizes = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(module, size) for size in sizes if hasattr(module, size))
            inputs = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
            inputs = inputs.to(torch.bfloat16)
            both: list[Any] = [module, others[name]]
            outputs = [each.quant_method.apply(each, inputs, None) for each in both]
            if not torch.equal(*outputs):
                names.append(f"output of {name}")
    return names


def structure(model: nn.Module) -> dict[str, object]:
    """Which tensor objects sit where, in which order, and what else the modules have."""
    return {
        name: (
            [(key, id(value)) for key, value in module._parameters.items()],
            [(key, id(value)) for key, value in module._buffers.items()],
            sorted(module._non_persistent_buffers_set),
            sorted(module.__dict__),
        )
        for name, module in model.named_modules()
    }


def addresses(model: nn.Module) -> dict[str, int]:
    return {
        f"{name}.{key}": tensor.data_ptr()
        for name, module in model.named_modules()
        for key, tensor in own_tensors(module).items()
    }
