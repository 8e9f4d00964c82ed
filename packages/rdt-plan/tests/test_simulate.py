"""The protocol as a whole: random fleets, plans and faults; and mutants that must be caught."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import (
    ConsumerId,
    Manifest,
    ParamMeta,
    Placement,
    SyncPlan,
    build_plan,
    rank_schedule,
    whole,
)
from rdt_plan._serve_stream import ServeStream
from rdt_plan.consumer_epoch import ConsumerEpoch, Scatter
from rdt_plan.epoch import EpochState, Finished
from rdt_plan.mailbox import Mailbox, Verdict
from rdt_plan.producer_epoch import ProducerEpoch, Ready
from rdt_plan.simulate import Faults, simulate
from rdt_plan.slots import SlotRing, SlotState
from rdt_plan.testing import manifests
from rdt_plan.transitions import ChunkEvent


@dataclass(frozen=True)
class Fleet:
    plans: tuple[SyncPlan, ...]
    groups: Mapping[int, Sequence[int]]
    lookahead: int


def copies(manifest: Manifest, names: Sequence[str]) -> list[Placement]:
    """Every parameter named, copied whole into a module of its own."""
    slices = [whole(manifest.param(name)) for name in names]
    return [Placement(s, s.name, "w", 0, s.shape, s.stride, s.dtype, s.stride) for s in slices]


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Owners, replicas of different sizes, what each worker reads, slots and lookahead."""
    manifest = draw(manifests(max_ranks=3, max_layers=2))
    names = [param.name for param in manifest.params]
    num_slots = draw(st.integers(1, 3))
    plans = []
    for replica in range(draw(st.integers(1, 2))):
        num_workers = draw(st.integers(1, 2))
        for worker in range(num_workers):
            read = (
                draw(st.lists(st.sampled_from(names), unique=True))
                if draw(st.booleans())
                else names
            )
            plan = build_plan(
                manifest,
                copies(manifest, read),
                ConsumerId(replica, worker),
                num_workers=num_workers,
                num_slots=num_slots,
                max_chunk_bytes=draw(st.sampled_from((64, 512, 4096))),
            )
            plans.append(plan)
    num_ranks = 1 + max(rank for param in manifest.params for rank in param.owners)
    groups = {rank: rank_schedule(manifest, rank) for rank in range(num_ranks)}
    return Fleet(tuple(plans), groups, draw(st.integers(0, 2)))


def small_fleet(lookahead: int = 1, num_slots: int = 2) -> Fleet:
    """Three ranks, five groups, four consumers of ten chunks each."""
    owners = [(0, 1), (0,), (1,), (0, 1, 2), (2,)]
    params = [ParamMeta(f"l.{i}.{c}", "int8", (8,), owners[i]) for i in range(5) for c in "ab"]
    manifest = Manifest.build(params)
    writes = copies(manifest, [param.name for param in params])
    consumers = [ConsumerId(replica, worker) for replica in range(2) for worker in range(2)]
    plans = [
        build_plan(manifest, writes, c, num_workers=2, num_slots=num_slots, max_chunk_bytes=8)
        for c in consumers
    ]
    return Fleet(
        tuple(plans), {rank: rank_schedule(manifest, rank) for rank in range(3)}, lookahead
    )


SEEDS = st.integers(0, 2**32)


@settings(max_examples=150)
@given(fleets(), SEEDS, st.sampled_from((0.0, 0.3)), st.sampled_from((0, 8)))
def test_every_epoch_finishes(fleet: Fleet, seed: int, rate: float, num_stale_events: int) -> None:
    faults = Faults(duplicate_rate=rate, num_stale_events=num_stale_events)
    report = simulate(
        fleet.plans, fleet.groups, lookahead=fleet.lookahead, seed=seed, faults=faults
    )
    assert report.violations == ()
    assert set(report.consumers.values()) == {EpochState.FINISHED}
    assert set(report.producers.values()) == {EpochState.FINISHED}
    assert report.max_resident <= fleet.lookahead + 1


@settings(max_examples=150)
@given(st.data(), fleets(), SEEDS)
def test_the_others_finish_when_some_are_dropped(
    data: st.DataObject, fleet: Fleet, seed: int
) -> None:
    consumers = [plan.consumer for plan in fleet.plans]
    drops = tuple(data.draw(st.lists(st.sampled_from(consumers), min_size=1, unique=True)))
    faults = Faults(drops=drops, duplicate_rate=0.1)
    report = simulate(
        fleet.plans, fleet.groups, lookahead=fleet.lookahead, seed=seed, faults=faults
    )
    assert report.violations == ()
    assert set(report.producers.values()) == {EpochState.FINISHED}
    live = {state for consumer, state in report.consumers.items() if consumer not in drops}
    assert live <= {EpochState.FINISHED}


@settings(max_examples=150)
@given(
    st.data(),
    fleets(),
    SEEDS,
    st.integers(0, 2),
    st.integers(0, 1),
)
def test_an_abort_ends_quiesced_everywhere(
    data: st.DataObject, fleet: Fleet, seed: int, num_aborts: int, num_read_failures: int
) -> None:
    consumers = [plan.consumer for plan in fleet.plans]
    faults = Faults(
        drops=tuple(data.draw(st.lists(st.sampled_from(consumers), unique=True, max_size=1))),
        num_aborts=num_aborts,
        num_read_failures=num_read_failures,
        num_stale_events=4,
        duplicate_rate=0.1,
    )
    report = simulate(
        fleet.plans, fleet.groups, lookahead=fleet.lookahead, seed=seed, faults=faults
    )
    assert report.violations == ()
    ends = {*report.consumers.values(), *report.producers.values()}
    assert ends <= {EpochState.FINISHED, EpochState.QUIESCED}


def test_equal_seeds_give_equal_runs() -> None:
    fleet = small_fleet()
    faults = Faults(drops=(ConsumerId(0, 1),), num_aborts=1, duplicate_rate=0.2)
    first, again = (
        simulate(fleet.plans, fleet.groups, lookahead=1, seed=7, faults=faults) for _ in range(2)
    )
    assert first == again


def test_the_lookahead_is_used() -> None:
    fleet = small_fleet(lookahead=2)
    most = max(
        simulate(fleet.plans, fleet.groups, lookahead=2, seed=seed).max_resident
        for seed in range(20)
    )
    assert most == 3


def test_a_fleet_without_consumers_finishes() -> None:
    report = simulate([], {0: [0, 1], 1: [1]}, lookahead=0, seed=0)
    assert report.violations == ()
    assert set(report.producers.values()) == {EpochState.FINISHED}


def test_too_many_steps_are_reported() -> None:
    fleet = small_fleet()
    report = simulate(fleet.plans, fleet.groups, lookahead=1, seed=0, max_steps=10)
    assert report.violations == ("not over after 10 steps",)


# ---- what the rules are for: without any one of them something goes wrong ---------------------


def violations(fleet: Fleet, faults: Faults, num_seeds: int = 30) -> list[str]:
    """The first violation of every run that has one."""
    reports = [
        simulate(fleet.plans, fleet.groups, lookahead=fleet.lookahead, seed=seed, faults=faults)
        for seed in range(num_seeds)
    ]
    return [report.violations[0] for report in reports if report.violations]


def test_gathering_in_different_orders_is_a_cycle_of_waits() -> None:
    found = violations(Fleet((), {0: [0, 1], 1: [1, 0]}, lookahead=0), Faults(), 1)
    assert [each.partition(":")[0] for each in found] == ["nothing can happen any more"]


def test_reading_against_the_schedule_is_refused_or_a_cycle_of_waits() -> None:
    """Two owners of two groups each; one consumer reads one owner's groups last to first."""
    fleet = small_fleet(lookahead=0, num_slots=1)
    reordered = sorted(fleet.plans[0].chunks, key=lambda c: (-c.owner, c.index))
    chunks = tuple(
        replace(chunk, index=index, receive_slot=0) for index, chunk in enumerate(reordered)
    )
    plans = (replace(fleet.plans[0], chunks=chunks), *fleet.plans[1:])
    found = violations(replace(fleet, plans=plans), Faults(), 5)
    assert len(found) == 5
    assert all("nothing can happen any more" in each for each in found)
    assert all("READY not received" in each for each in found)


class FreedByAnOlderGeneration(SlotRing):
    """Once enqueued, any completion frees the slot, be it of an earlier use."""

    def enqueued(self, slot: int, generation: int) -> None:
        if self._states[slot] is not SlotState.FREE:
            self._states[slot] = SlotState.DRAINING

    def completed(self, slot: int, generation: int) -> None:
        if self._states[slot] is SlotState.DRAINING:
            self._states[slot] = SlotState.FREE


class FreedBeforeEnqueued(SlotRing):
    """The event is asked before its scatter was enqueued, and answers for an earlier one."""

    def enqueued(self, slot: int, generation: int) -> None:
        pass

    def completed(self, slot: int, generation: int) -> None:
        if generation == self._generations[slot]:
            self._states[slot] = SlotState.FREE


class FreedWhenEnqueued(SlotRing):
    def enqueued(self, slot: int, generation: int) -> None:
        super().enqueued(slot, generation)
        self._states[slot] = SlotState.FREE

    def completed(self, slot: int, generation: int) -> None:
        pass


class NeverFreed(SlotRing):
    def completed(self, slot: int, generation: int) -> None:
        pass


class PackedBeforeDone(ServeStream):
    def has_free_slot(self, seq: int) -> bool:
        return True


class ReadyWhenEnqueued(ProducerEpoch):
    def pack_enqueued(self, consumer: ConsumerId, seq: int) -> list:
        return [*super().pack_enqueued(consumer, seq), Ready(consumer, seq)]


class WithoutCredit(ProducerEpoch):
    def may_publish(self) -> bool:
        return self.state is EpochState.RUNNING and self._num_published < len(self._groups)


class ReleasedUnderPacks(ProducerEpoch):
    """A dropped consumer's groups are released although packs still read them."""

    def drop(self, consumer: ConsumerId, reason: str) -> list:
        for holders in self._holders.values():
            holders.difference_update({key for key in holders if key[0] == consumer})
        return super().drop(consumer, reason)


class NeverReleased(ProducerEpoch):
    def _release(self) -> list:
        return []


class FinishedWithGroups(ProducerEpoch):
    """It ends with the last group published, whoever still reads."""

    def _release(self) -> list:
        actions = super()._release()
        if self._num_published < len(self._groups) or self.state is not EpochState.RUNNING:
            return actions
        self._state = EpochState.FINISHED
        return [*actions, Finished()]


class DropForgotten(ProducerEpoch):
    def drop(self, consumer: ConsumerId, reason: str) -> list:
        return []


class QuiescedWithPacks(ProducerEpoch):
    def _quiesce(self) -> list:
        self._packs.clear()
        return super()._quiesce()


class QuiescedWithReads(ConsumerEpoch):
    def _quiesce(self) -> list:
        self._in_flight.clear()
        return super()._quiesce()


class FinishedWhenEnqueued(ConsumerEpoch):
    def scatter_enqueued(self, index: int) -> list:
        return super().scatter_enqueued(index) + super().scatter_completed(index)

    def scatter_completed(self, index: int) -> list:
        return []


class LosesAChunk(ConsumerEpoch):
    def read_done(self, index: int) -> list:
        actions = super().read_done(index)
        if Scatter(3) not in actions:
            return actions
        actions.remove(Scatter(3))
        return actions + super().scatter_enqueued(3) + super().scatter_completed(3)


class HandsOutWhatLands(ConsumerEpoch):
    def read_done(self, index: int) -> list:
        self._move(index, ChunkEvent.READ_DONE)
        self._move(index, ChunkEvent.HANDED_OUT)
        return [Scatter(index)]


class EarlyReadyLost(Mailbox):
    def accept(self, doorbell):  # type: ignore[no-untyped-def]
        verdict = super().accept(doorbell)
        return Verdict.DROPPED if verdict is Verdict.KEPT else verdict

    def open(self, session: bytes, epoch: int) -> list:
        super().open(session, epoch)
        return []


STALE = Faults(num_stale_events=30)
DROP = Faults(drops=(ConsumerId(0, 0), ConsumerId(1, 1)))
ABORT = Faults(num_aborts=1)
CONSUMER, PRODUCER = "rdt_plan._simulated_consumer", "rdt_plan._simulated_producer"


@pytest.mark.parametrize(
    ("place", "mutant", "faults", "says"),
    [
        ("rdt_plan.consumer_epoch.SlotRing", FreedBeforeEnqueued, STALE, "in its slot"),
        ("rdt_plan.consumer_epoch.SlotRing", FreedByAnOlderGeneration, STALE, "in its slot"),
        ("rdt_plan.consumer_epoch.SlotRing", FreedWhenEnqueued, Faults(), "in its slot"),
        ("rdt_plan.consumer_epoch.SlotRing", NeverFreed, Faults(), "still used by"),
        ("rdt_plan.producer_epoch.ServeStream", PackedBeforeDone, Faults(), "in its slot"),
        (f"{PRODUCER}.ProducerEpoch", ReadyWhenEnqueued, Faults(), "in its slot"),
        (f"{PRODUCER}.ProducerEpoch", WithoutCredit, Faults(), "are resident"),
        (f"{PRODUCER}.ProducerEpoch", ReleasedUnderPacks, DROP, "not resident"),
        (f"{PRODUCER}.ProducerEpoch", NeverReleased, Faults(), "nothing can happen any more"),
        (f"{PRODUCER}.ProducerEpoch", FinishedWithGroups, Faults(), "were never released"),
        (f"{PRODUCER}.ProducerEpoch", DropForgotten, DROP, "for a dropped consumer"),
        (f"{PRODUCER}.ProducerEpoch", QuiescedWithPacks, ABORT, "with a pack in flight"),
        (f"{CONSUMER}.ConsumerEpoch", QuiescedWithReads, ABORT, "with something in flight"),
        (f"{CONSUMER}.ConsumerEpoch", FinishedWhenEnqueued, Faults(), "in its slot"),
        (f"{CONSUMER}.ConsumerEpoch", HandsOutWhatLands, Faults(), "was handed out before"),
        (f"{CONSUMER}.ConsumerEpoch", LosesAChunk, Faults(), "finished with chunks"),
        (f"{CONSUMER}.Mailbox", EarlyReadyLost, Faults(), "READY not received"),
    ],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    mutant: Callable[..., object],
    faults: Faults,
    says: str,
) -> None:
    fleet = small_fleet()
    assert violations(fleet, faults) == []
    monkeypatch.setattr(place, mutant)
    found = violations(fleet, faults)
    assert any(says in each for each in found), found
