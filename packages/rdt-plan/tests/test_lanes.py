"""Lanes: what keeps an order, what does not, and a slow owner that holds up nobody else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ConsumerId, Manifest, ParamMeta, Placement, SyncPlan, build_plan
from rdt_plan.consumer_epoch import ConsumerEpoch, PostRead, Scatter
from rdt_plan.epoch import Finished
from rdt_plan.errors import PlanError
from rdt_plan.lanes import lanes_of, slots_of
from rdt_plan.slices import whole
from rdt_plan.testing import read_chunks

CHUNKS = st.lists(st.tuples(st.integers(0, 6), st.sets(st.sampled_from("abcdef"), max_size=2)))


def tied_sets(chunks: list[tuple[int, set[str]]]) -> list[set[int]]:
    """The owners of each lane, without a bound: sets that a module joins become one."""
    found = [{owner} for owner in dict.fromkeys(owner for owner, _ in chunks)]
    for module in "abcdef":
        owners = {owner for owner, modules in chunks if module in modules}
        joined = [each for each in found if each & owners]
        if joined:
            found = [each for each in found if not each & owners] + [set().union(*joined)]
    return sorted(found, key=lambda each: [owner for owner, _ in chunks].index(first(each, chunks)))


def first(owners: set[int], chunks: list[tuple[int, set[str]]]) -> int:
    return next(owner for owner, _ in chunks if owner in owners)


@given(CHUNKS)
def test_owners_are_of_one_lane_that_a_module_ties_together(chunks) -> None:
    expected = {
        owner: number for number, owners in enumerate(tied_sets(chunks)) for owner in owners
    }
    assert lanes_of(chunks) == expected


@given(st.integers(1, 5), st.data())
def test_every_receive_slot_is_of_one_lane(num_slots, data) -> None:
    num_lanes = data.draw(st.integers(1, num_slots))
    slots = [slots_of(lane, num_lanes, num_slots) for lane in range(num_lanes)]
    assert sorted(slot for each in slots for slot in each) == list(range(num_slots))
    assert all(slots)


def two_stages(num_slots: int = 2) -> SyncPlan:
    """Three layers a stage, one chunk each, of ranks 0 and 1."""
    params = [ParamMeta(f"l.{i}.w", "int8", (64,), (i // 3,)) for i in range(6)]
    copies = [Placement(s, s.name, "w", 0, (64,), (1,), "int8", (1,)) for s in map(whole, params)]
    manifest = Manifest.build(params)
    return build_plan(manifest, copies, ConsumerId(0, 0), num_workers=1, num_slots=num_slots)


def test_a_stage_that_is_slow_does_not_hold_up_the_other() -> None:
    """Rank 0 has announced nothing, and all that rank 1 serves is read, scattered and installed."""
    plan = two_stages()
    assert [chunk.owner for chunk in plan.chunks] == [0, 1, 0, 1, 0, 1]  # by the group schedule
    epoch = ConsumerEpoch(plan.chunks, plan.num_slots, plan.lanes)
    assert epoch.begin() == []
    for seq, index in enumerate((1, 3, 5)):
        assert epoch.ready(1, seq) == [PostRead(index)]
        assert epoch.read_done(index) == [Scatter(index)]
        epoch.scatter_enqueued(index)
        assert epoch.scatter_completed(index) == []
    assert "chunk 0 (seq 0, l.0.w) of producer 0: READY not received" in epoch.waiting_for()
    for seq, index in enumerate((0, 2, 4)):
        assert epoch.ready(0, seq) == [PostRead(index)]
        assert epoch.read_done(index) == [Scatter(index)]
        epoch.scatter_enqueued(index)
        assert epoch.scatter_completed(index) == ([Finished()] if index == 4 else [])


def test_owners_that_take_turns_for_the_same_names_are_of_one_lane() -> None:
    """They hold the same and gather together, so two lanes would only part the receive slots."""
    params = [ParamMeta(f"l.{i}.w", "int8", (64,), (0, 1)) for i in range(4)]
    params.append(ParamMeta("l.4.w", "int8", (64,), (2,)))
    params.append(ParamMeta("norm", "int8", (64,), (0, 1, 2)))  # of one group: nobody takes turns
    copies = [Placement(s, s.name, "w", 0, (64,), (1,), "int8", (1,)) for s in map(whole, params)]
    plan = build_plan(Manifest.build(params), copies, ConsumerId(0, 0), num_workers=1)
    assert plan.owners == (0, 1, 2)
    assert plan.lanes[0] == plan.lanes[1] != plan.lanes[2]


def test_with_one_receive_slot_everything_is_one_lane() -> None:
    plan = two_stages(num_slots=1)
    assert plan.lanes == {0: 0, 1: 0}
    epoch = ConsumerEpoch(plan.chunks, plan.num_slots, plan.lanes)
    epoch.begin()
    assert epoch.ready(1, 0) == []


def test_a_lane_has_all_receive_slots_when_it_is_alone() -> None:
    plan = two_stages(num_slots=3)
    assert [chunk.receive_slot for chunk in plan.chunks] == [0, 1, 2, 1, 0, 1]
    stage = replace(plan, chunks=tuple(chunk for chunk in plan.chunks if chunk.owner == 0))
    assert stage.lanes == {0: 0}


def test_lanes_that_share_a_receive_slot_are_refused() -> None:
    with pytest.raises(PlanError, match="chunk 1: receive slot 0 is of another lane"):
        ConsumerEpoch(
            [replace(chunk, receive_slot=0) for chunk in read_chunks([0, 1], 2)], 2, {0: 0, 1: 1}
        )
