"""What one worker pulls from a job and how it is installed: decided when the worker attaches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rdt_bake import Recording
from rdt_plan import ConsumerId, Manifest, SyncPlan, build_plan
from rdt_plan.direct import DirectRule
from rdt_plan.records import JobRecord
from rdt_transport.device_memory import is_registrable
from rdt_vllm.probe import Probe
from rdt_vllm.units import InstallUnits

__all__ = ["WorkerPlan", "direct_places"]

_logger = logging.getLogger("rdt_vllm")


@dataclass(frozen=True)
class WorkerPlan:
    """A plan, and the units that its modules form; they belong together."""

    plan: SyncPlan
    units: InstallUnits

    @classmethod
    def build(
        cls,
        model: nn.Module,
        recording: Recording,
        manifest: Manifest,
        job: JobRecord,
        consumer: ConsumerId,
        num_workers: int,
        *,
        probe: Probe | None,
        direct: bool,
    ) -> "WorkerPlan":
        """Plan one consumer's syncs of ``manifest``, and log how.

        Args:
            model: the worker's model, in kernel form.
            recording: of its loaders.
            manifest: the job's, decoded.
            job: whose producers have published.
            consumer: who pulls.
            num_workers: workers of its replica.
            probe: tells which modules are live; None: none.
            direct: whether live tensors are read into directly, where memory allows it.

        Raises:
            UnsupportedError: see `InstallUnits`.
            RdtPlanError: see `build_plan`.
        """
        units = InstallUnits(model, recording, probe)
        live = units.live_tensors()
        places = direct_places(live) if direct else frozenset()
        plan = build_plan(
            manifest,
            recording.writes,
            consumer,
            num_workers=num_workers,
            num_slots=job.num_slots,
            max_chunk_bytes=job.max_chunk_bytes,
            programs=recording.programs,
            direct=DirectRule.of(manifest, job.producers, places),
        )
        _logger.info(
            "consumer %s of %d: %s; %d chunks, %d bytes a sync direct and %d staged, of which a "
            "module keeps up to %d to compute from; %d live tensors cannot be read into directly",
            consumer,
            num_workers,
            units.summary(),
            len(plan.chunks),
            plan.direct_bytes,
            plan.staged_bytes,
            max(plan.staging_bytes.values(), default=0),
            len(live) - len(places),
        )
        if recording.ignored:
            _logger.info(
                "consumer %s does not consume %d of %d weights (another worker may), first %s",
                consumer,
                len(recording.ignored),
                len(manifest.params),
                ", ".join(recording.ignored[:3]),
            )
        return cls(plan, units)

    def destination(self, path: str, name: str) -> torch.Tensor:
        """The live tensor of (module, param), as it is now."""
        return self.units.of[path].destination(path, name)


def direct_places(live: Mapping[tuple[str, str], torch.Tensor]) -> frozenset[tuple[str, str]]:
    """Where a READ may land: contiguous memory, and none that sleeping takes away.

    Nor any that two of these tensors show: reads end in any order, and the last one would stay.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), place)
        for place, tensor in live.items()
        if tensor.numel()
    )
    shared: set[tuple[str, str]] = set()
    last, end = None, 0  # which of those so far reaches furthest
    for start, stop, place in spans:
        if last is not None and start < end:
            shared |= {place, last}
        if stop > end:
            last, end = place, stop
    return frozenset(
        place
        for _, _, place in spans
        if place not in shared and live[place].is_contiguous() and is_registrable(live[place])
    )


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From its first element to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((extent - 1) * step for extent, step in steps)) * tensor.element_size()
