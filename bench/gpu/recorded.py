"""What a worker recorded of a sync, in the words of `bench.stages`."""

from collections.abc import Iterable

from bench.stages import ChunkFacts, Interval
from rdt_plan import SyncPlan
from rdt_transport.intervals import Interval as Recorded

__all__ = ["chunk_facts", "plan_facts", "worker_intervals"]

_STAGES = {"ready": "ready-wait", "read": "wire"}


def worker_intervals(recorded: Iterable[Recorded] | None) -> list[Interval]:
    """The worker's intervals; none where they were not kept."""
    return [Interval(_STAGES.get(each.stage, each.stage), *each[1:]) for each in recorded or ()]


def chunk_facts(plan: SyncPlan) -> list[ChunkFacts]:
    """What the walk over a trace must know of the plan's chunks."""
    return [
        ChunkFacts(chunk.serve.group, chunk.serve.serve_slot, chunk.receive_slot)
        for chunk in plan.chunks
    ]


def plan_facts(plan: SyncPlan) -> dict[str, int]:
    """How many bytes of a sync go which way."""
    return {
        "chunks": len(plan.chunks),
        "direct_bytes": plan.direct_bytes,
        "staged_bytes": plan.staged_bytes,
    }
