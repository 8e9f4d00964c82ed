"""Where a sync's time is said to have gone, against a pipeline whose every step is known."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stages import STAGES, UNATTRIBUTED, ChunkFacts, Interval, Trace, blame, busy

HOP = 0.00005  # a doorbell's way
STEPS = ("gather", "pack", "wire", "scatter", "post-process")


def pipeline(
    num_chunks: int, seconds: Mapping[str, float], num_slots: int, direct: bool = False
) -> Trace:
    """A sync of chunks that are a group each, run as the protocol runs them, in exact time."""
    slots = [None if direct else index % num_slots for index in range(num_chunks)]
    ends: dict[tuple[str, int], float] = {}
    intervals = [Interval("control", 0, 0.0, seconds["control"])]

    def do(stage: str, index: int, *after: float) -> float:
        start = max(after)
        ends[stage, index] = start + seconds[stage]
        intervals.append(Interval(stage, index, start, ends[stage, index]))
        return ends[stage, index]

    def end(stage: str, index: int) -> float:
        return ends.get((stage, index), 0.0)

    began = seconds["control"]
    for index in range(num_chunks):
        # Lookahead 1: the group before the last one is released.
        do("gather", index, began, end("gather", index - 1), end("wire", index - 2) + HOP)
        if not direct:
            freed = end("wire", index - num_slots) + HOP
            do("pack", index, end("gather", index), end("pack", index - 1), freed)
        readable = end("gather" if direct else "pack", index) + HOP
        intervals.append(Interval("ready-wait", index, began, readable))
        do("wire", index, readable, end("scatter", index - num_slots))
        if not direct:
            do("scatter", index, end("wire", index), end("scatter", index - 1))
            done = do("post-process", index, end("scatter", index), end("post-process", index - 1))
        else:
            done = end("wire", index)
    intervals.append(Interval("control", 1, began, done + seconds["control"]))
    facts = [ChunkFacts(index, slot, slot) for index, slot in enumerate(slots)]
    return Trace(0.0, done + seconds["control"], intervals, facts)


spans = st.integers(1, 50).map(lambda n: n / 1000) | st.just(0.00001)  # shorter than the slack


@given(
    st.integers(1, 12),
    st.fixed_dictionaries({stage: spans for stage in (*STEPS, "control")}),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_instant_of_a_sync_is_given_to_exactly_one_stage(
    num_chunks: int, seconds: dict[str, float], num_slots: int, direct: bool
) -> None:
    trace = pipeline(num_chunks, seconds, num_slots, direct)
    found = blame(trace)
    assert set(found) == {*STAGES, UNATTRIBUTED}
    assert sum(found.values()) == pytest.approx(trace.end - trace.start)
    assert found[UNATTRIBUTED] <= 0.05 * (trace.end - trace.start)


@given(st.integers(2, 12), st.sampled_from(STEPS), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_stage_slowed_by_a_known_time_is_blamed_for_that_time(
    num_chunks: int, slow: str, num_slots: int
) -> None:
    """One that is slower than all others together is what every chunk waits for."""
    seconds = dict.fromkeys((*STEPS, "control"), 0.001)
    at_first = pipeline(num_chunks, seconds | {slow: 0.1}, num_slots)
    slowed = pipeline(num_chunks, seconds | {slow: 0.15}, num_slots)
    grown = blame(slowed)[slow] - blame(at_first)[slow]
    assert grown == pytest.approx(slowed.end - at_first.end, rel=0.01)
    in_turn = num_chunks if slow != "wire" else -(-num_chunks // num_slots)  # reads overlap
    assert grown >= 0.05 * in_turn * 0.99


def test_what_overlaps_is_busy_but_not_to_blame() -> None:
    seconds = dict.fromkeys((*STEPS, "control"), 0.001) | {"wire": 0.02}
    trace = pipeline(10, seconds, 2)
    assert busy(trace)["gather"] == pytest.approx(0.010)
    assert blame(trace)["gather"] < 0.007  # a release in between made some wait for it
    assert blame(trace)["wire"] == pytest.approx(0.1, rel=0.01)


def test_what_nobody_recorded_is_unattributed() -> None:
    trace = pipeline(3, dict.fromkeys((*STEPS, "control"), 0.001), 2)
    late = Trace(trace.start - 0.5, trace.end, trace.intervals, trace.chunks)
    assert blame(late)[UNATTRIBUTED] == pytest.approx(0.5)
