"""Where the time of one sync went: *busy*, what each stage did, and *blame*, what it waited for.

Both read recorded intervals alone: nothing is computed as a remainder. `blame` walks back from the
end of the sync along what each step waited for, so that each instant belongs to one stage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["STAGES", "ChunkFacts", "Interval", "Trace", "blame", "busy"]

STAGES = ("gather", "pack", "ready-wait", "wire", "scatter", "post-process", "control")
UNATTRIBUTED = "unattributed"
SLACK_SECONDS = 1e-4  # by which two threads may see the same moment apart


class Interval(NamedTuple):
    """One thing that one process did, in seconds of a clock that all processes share.

    ``index``: of the chunk, of the group for "gather", of the call for "control"; for
    "post-process", its turn among them.
    """

    stage: str
    index: int
    start: float
    end: float


class ChunkFacts(NamedTuple):
    """What the walk must know of a chunk: its gather group, and its slots (None: direct)."""

    group: int
    serve_slot: int | None
    receive_slot: int | None


@dataclass(frozen=True)
class Trace:
    """One sync, as its slowest worker and that worker's producer recorded it.

    Attributes:
        start, end: of the whole sync, as its caller saw it.
        intervals: of all stages.
        chunks: of the worker's plan, in plan order.
    """

    start: float
    end: float
    intervals: Sequence[Interval]
    chunks: Sequence[ChunkFacts]


def busy(trace: Trace) -> dict[str, float]:
    """Seconds in which each stage did something; stages overlap, but no stage with itself."""
    return {stage: _covered(i for i in trace.intervals if i.stage == stage) for stage in STAGES}


def blame(trace: Trace) -> dict[str, float]:
    """Seconds by stage of which the sync would be shorter without it, `STAGES` and unattributed.

    The walk begins at the end of the sync with the control call that ended it. What a step waited
    for is, of all that must have ended before it, what ended last; a step that had begun before
    that ended is blamed from then on only. The time between the two is the worker's wait for a
    READY where one was recorded then, a control call's where one was, and unattributed otherwise.
    """
    spent = dict.fromkeys((*STAGES, UNATTRIBUTED), 0.0)
    walk = _Walk(trace)
    now, step = trace.end, walk.last_control()
    while step is not None and now > trace.start:
        begun = max(step.start, trace.start)
        before = walk.before(step)
        since = max(begun, min(before.end, now)) if before is not None else begun
        ended = min(step.end, now)
        walk.share_gap(spent, ended, now)
        spent[step.stage] += max(0.0, ended - since)
        now, step = min(since, ended), before
    walk.share_gap(spent, trace.start, now)
    return spent


class _Walk:
    """The steps of a trace, and which of them each one waited for."""

    def __init__(self, trace: Trace) -> None:
        self._chunks = trace.chunks
        self._walked: set[Interval] = set()
        self._by_step: dict[tuple[str, int], Interval] = {}
        for each in trace.intervals:
            self._by_step[each.stage, each.index] = each
        self._control = [each for each in trace.intervals if each.stage == "control"]
        self._calls = [(each.stage, each.index) for each in self._control]
        self._processed = [key for key in self._by_step if key[0] == "post-process"]
        self._waits = [each for each in trace.intervals if each.stage == "ready-wait"]

    def last_control(self) -> Interval | None:
        """The call that ended the sync."""
        return max(self._control, key=lambda each: each.end, default=None)

    def before(self, step: Interval) -> Interval | None:
        """What ended last of all that ``step`` waited for; None for what waited for nothing."""
        found = [self._by_step[key] for key in self._causes(step) if key in self._by_step]
        # A call lasts while the worker does what it asks for; all else begins after its causes.
        latest = step.end if step.stage == "control" else step.start + SLACK_SECONDS
        self._walked.add(step)  # two steps shorter than the slack could each be before the other
        found = [each for each in found if each.end <= latest and each not in self._walked]
        return max(found, key=lambda each: each.end, default=None)

    def _causes(self, step: Interval) -> Iterable[tuple[str, int]]:
        """The steps that must have ended before ``step`` could, or could begin."""
        match step.stage:
            case "control":  # the last call returns when everything is installed
                for index in range(len(self._chunks)):
                    yield from (("scatter", index), ("wire", index))
                yield from self._processed
                yield from self._calls
            case "post-process":  # of a module whose last chunk is there: one that just came
                for index in range(len(self._chunks)):
                    yield from (("scatter", index), ("wire", index))
                yield from (("post-process", each) for each in range(step.index))
                yield from self._calls
            case "scatter":
                yield "wire", step.index
                yield from (("scatter", each) for each in range(step.index))
            case "wire":
                chunk = self._chunks[step.index]
                if chunk.serve_slot is None:
                    yield "gather", chunk.group
                else:
                    yield "pack", step.index
                    yield from self._earlier("scatter", step.index, chunk.receive_slot, 2)
                yield from self._calls
            case "pack":
                chunk = self._chunks[step.index]
                yield "gather", chunk.group
                yield from (("pack", each) for each in range(step.index))
                yield from self._earlier("wire", step.index, chunk.serve_slot, 1)
            case "gather":  # the next group waits for the release of an earlier one
                for index, chunk in enumerate(self._chunks):
                    yield from (("gather", chunk.group), ("wire", index))
                yield from self._calls
            case _:
                return

    def _earlier(
        self, stage: str, index: int, slot: int | None, field: int
    ) -> Iterable[tuple[str, int]]:
        """``stage`` of the earlier chunks in the same slot."""
        for each in range(index):
            if self._chunks[each][field] == slot:
                yield stage, each

    def share_gap(self, spent: dict[str, float], start: float, end: float) -> None:
        """Blame [start, end), between two steps, on the waits recorded in it."""
        if end <= start:
            return
        waits = [*self._waits, *self._control]
        borders = {start, end}
        for each in waits:
            borders |= {border for border in each[2:] if start < border < end}
        edges = sorted(borders)
        for left, right in pairwise(edges):
            middle = (left + right) / 2
            stages = {i.stage for i in waits if i.start <= middle < i.end}
            stage = next((s for s in ("ready-wait", "control") if s in stages), UNATTRIBUTED)
            spent[stage] += right - left


def _covered(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of them covers."""
    total, reached = 0.0, float("-inf")
    for each in sorted(intervals, key=lambda i: i.start):
        total += max(0.0, each.end - max(each.start, reached))
        reached = max(reached, each.end)
    return total
