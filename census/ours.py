"""Recording and replaying as a worker with backend ``rdt`` does, with the bytes at hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import nn

from census.as_found import Portrait
from census.comparison import patterns
from census.damage import Damage, damaged
from census.models import Models, Weights
from census.outcome import RefusedError, WrongError
from census.reasons import refusal_reason
from rdt_bake import PlanReplay, RdtBakeError, Recording, written_targets
from rdt_plan import (
    Chunk,
    ConsumerId,
    Manifest,
    ParamMeta,
    Program,
    RdtPlanError,
    build_plan,
    group_ordered,
    is_staging,
    item_bytes,
)
from rdt_transport.pack import PackList, check_source
from rdt_vllm import _vllm
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.recording import record_model
from rdt_vllm.refusals import check_supported
from rdt_vllm.units import InstallUnit, InstallUnits

__all__ = ["OurSync"]

# Small, so that most tensors are cut.
_MAX_CHUNK_BYTES = 16 << 10


class OurSync:
    """A sync of a model that holds ``old``: recorded, planned, and ready to `run`.

    The model that is recorded is in kernel form, as a worker's is. The one that is written to is
    not, so that it can be compared before post-processing.

    Raises:
        RefusedError: by our own typed errors, all of them raised before any byte is asked for.
        WrongError: recording has changed the model.
    """

    def __init__(self, models: Models, old: Weights) -> None:
        self._models = models
        metas = {
            name: ParamMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in old.items()
        }
        served = _served(models, old)
        try:
            self._manifest = Manifest.build(metas[name] for name in group_ordered(list(metas)))
            recording = _recorded(served, self._manifest.params, models)
            self._plan = build_plan(
                self._manifest,
                recording.writes,
                ConsumerId(0, 0),
                num_workers=1,
                max_chunk_bytes=_MAX_CHUNK_BYTES,
                programs=recording.programs,
            )
            self._model = models.loaded(old)
            self._units = InstallUnits(self._model, recording, None).of
        except (RdtBakeError, RdtPlanError, UnsupportedError) as error:
            raise RefusedError(refusal_reason(error)) from error

    @property
    def unread(self) -> frozenset[str]:
        """Names with elements of which nothing is pulled."""
        read = {region.name for chunk in self._plan.chunks for region in chunk.serve.slices}
        return frozenset(p.name for p in self._manifest.params if p.numel and p.name not in read)

    @property
    def bytes_pulled(self) -> int:
        return self._plan.slice_bytes

    @property
    def bytes_landed(self) -> int:
        """What had to be pulled: the elements that are written, in their slices' dtypes."""
        placed = sum(
            prod(placement.shape) * item_bytes(placement.slice.dtype)
            for chunk in self._plan.chunks
            for placement in chunk.placements
            if not is_staging(placement.param)
        )
        return placed + sum(map(self._bytes_computed, self._plan.programs))

    def _bytes_computed(self, program: Program) -> int:
        """Elements of the tensors that a program writes, in the widest dtype that it reads."""
        widths = [item_bytes(slice_.dtype) for _, slice_ in program.inputs]
        module = self._units[program.module].modules[program.module]
        tensors = own_tensors(module)
        return max(widths, default=0) * sum(
            tensors[name].numel() for name in written_targets(program) if name in tensors
        )

    @property
    def unproven(self) -> str:
        """Classes whose post-processing a worker refuses to run again, in words; mostly none."""
        facts = _vllm.engine_facts(self._models.vllm_config, self._model)
        return ", ".join(sorted({kind for _, kind in facts.unproven}))

    def check_supported(self, *, is_quantised: bool) -> None:
        """What a worker checks besides; raises `RefusedError`.

        Args:
            is_quantised: leave out how quantised layers are post-processed.
        """
        facts = _vllm.engine_facts(self._models.vllm_config, self._model)
        try:
            check_supported(replace(facts, unproven=()) if is_quantised else facts)
        except UnsupportedError as error:
            raise RefusedError(refusal_reason(error)) from error

    def run(self, weights: Weights, damage: Damage | None) -> nn.Module:
        """The model once ``weights`` are in it, not post-processed; once."""
        units = dict.fromkeys(self._units.values())
        with self._models.context():
            sync = PlanReplay(self._plan, self._destination)
            for unit in units:
                unit.open()
                for path in unit.modules:
                    sync.open(path)
            for chunk, packed in self._arriving(weights, damage):
                sync.place(chunk, packed)
            for unit in units:
                for path in unit.modules:
                    sync.compute(path)
                _close(unit)
        return self._model

    def _destination(self, module: str, param: str) -> torch.Tensor:
        return self._units[module].destination(module, param)

    def _arriving(
        self, weights: Weights, damage: Damage | None
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The packed chunks through one slot, each placement as a chunk of its own."""
        number = 0
        slot = torch.empty(self._plan.receive_slot_bytes, dtype=torch.uint8)
        for chunk in self._plan.chunks:
            slot.fill_(0xA5)
            names = dict.fromkeys(region.name for region in chunk.serve.slices)
            PackList(chunk.serve, slot).run(
                {name: check_source(self._manifest.param(name), weights[name]) for name in names}
            )
            offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
            for placement in chunk.placements:
                packed = slot.clone()
                start = offsets[placement.slice]
                own = packed[start : start + placement.slice.num_bytes]
                value = damaged(own, damage, number)
                number += 1
                if value is not None:
                    own.copy_(value)
                    yield replace(chunk, placements=(placement,)), packed


def _close(unit: InstallUnit) -> None:
    """As the unit's own `close`, without post-processing: values go into the tensors that serve."""
    filled = {path: own_tensors(module) for path, module in unit.modules.items()}
    unit.abandon()
    for path, module in unit.modules.items():
        for name, serving in own_tensors(module).items():
            if name in filled[path]:
                serving.data.copy_(filled[path][name].data)


def _served(models: Models, weights: Weights) -> nn.Module:
    """A model in kernel form; as loaded, where this CPU cannot post-process it."""
    model = models.loaded(weights)
    try:
        models.post_process(model)
    except Exception:
        return models.loaded(weights)
    return model


def _recorded(model: nn.Module, params: Sequence[ParamMeta], models: Models) -> Recording:
    portrait = Portrait(model)
    try:
        return record_model(model, params, models.vllm_config)
    finally:
        if changes := portrait.changes():
            raise WrongError(f"recording changes the model: {patterns(changes)}")
