"""What the parties recorded of a sync, in the words of `bench.stages`."""

from collections.abc import Iterable
from itertools import count

from bench.stages import ChunkFacts, Interval
from rdt_plan import SyncPlan
from rdt_transport.intervals import Interval as Recorded

__all__ = ["chunk_facts", "numbered", "on_their_way", "plan_facts", "worker_intervals"]

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


def on_their_way(ours: list[Interval], calls: list[Interval]) -> list[Interval]:
    """The worker's calls: each from when the trainer had made them, or the worker was through with
    the one before, until it began."""
    made = [each.end for each in ours if each.stage == "control"][:1]
    begun = sorted(each for each in calls if each.stage == "control")
    ends = [*made, *(each.end for each in begun)]
    return [
        Interval("control", -1, end, each.start)
        for end, each in zip(ends, begun, strict=False)
        if end < each.start
    ]


def numbered(intervals: list[Interval]) -> list[Interval]:
    """Control calls come from two processes, and modules have no number: each gets its own."""
    numbered = []
    turns = {"control": count(), "post-process": count()}
    for each in sorted(intervals, key=lambda each: each.start):
        turn = turns.get(each.stage)
        numbered.append(each if turn is None else each._replace(index=next(turn)))
    return numbered
