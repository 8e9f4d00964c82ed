"""The protocol as a whole: random fleets and plans, several epochs, and whatever may go wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import (
    ConsumerId,
    DirectRule,
    Manifest,
    Placement,
    SyncPlan,
    build_plan,
    rank_schedule,
    whole,
)
from rdt_plan.epoch import EpochState
from rdt_plan.simulate import Faults, Report, simulate
from rdt_plan.testing import manifests, num_examples, small_fleet

OVER = {EpochState.FINISHED, EpochState.QUIESCED}
SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True)
class Fleet:
    plans: tuple[SyncPlan, ...]
    groups: Mapping[int, Sequence[int]]
    lookahead: int
    standing: Mapping[int, Sequence[int]]

    @property
    def replicas(self) -> list[int]:
        return sorted({plan.consumer.replica for plan in self.plans})

    def run(self, seed: int, num_epochs: int, faults: Faults) -> Report:
        """A run in which nothing goes wrong but ``faults``."""
        report = simulate(
            self.plans,
            self.groups,
            lookahead=self.lookahead,
            seed=seed,
            num_epochs=num_epochs,
            faults=faults,
            standing=self.standing,
        )
        assert report.violations == ()
        assert {*report.consumers.values(), *report.producers.values()} <= OVER
        assert report.max_resident <= self.lookahead + 1
        return report


def replica_of(
    draw: st.DrawFn, manifest: Manifest, replica: int, num_slots: int, rule: DirectRule
) -> list[SyncPlan]:
    names = [param.name for param in manifest.params]
    num_workers = draw(st.integers(1, 2))
    max_chunk_bytes = draw(st.sampled_from((64, 512, 4096)))
    plans = []
    for worker in range(num_workers):
        some = st.lists(st.sampled_from(names), unique=True)
        slices = [whole(manifest.param(n)) for n in draw(st.one_of(st.just(names), some))]
        plans.append(
            build_plan(
                manifest,
                [
                    Placement(s, s.name, "w", 0, s.shape, s.stride, s.dtype, s.stride)
                    for s in slices
                ],
                ConsumerId(replica, worker),
                num_workers=num_workers,
                num_slots=num_slots,
                max_chunk_bytes=max_chunk_bytes,
                direct=rule if draw(st.integers(0, 3)) else None,
                max_direct_bytes=max_chunk_bytes,
            )
        )
    return plans


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Any owners; replicas of different sizes, some of which share the rings of another one."""
    manifest = draw(manifests(max_ranks=3, max_layers=2))
    num_slots = draw(st.integers(1, 3))
    num_ranks = 1 + max(rank for param in manifest.params for rank in param.owners)
    names = [param.name for param in manifest.params]
    some = st.frozensets(st.sampled_from(names))
    rule = DirectRule(
        {rank: draw(some) for rank in range(num_ranks)},
        frozenset((name, "w") for name in draw(st.one_of(st.just(names), some))),
    )
    replicas = [replica_of(draw, manifest, 0, num_slots, rule)]
    for replica in range(1, draw(st.integers(1, 3))):
        twin = draw(st.one_of(st.none(), st.sampled_from(replicas)))
        replicas.append(
            replica_of(draw, manifest, replica, num_slots, rule)
            if twin is None
            else [replace(p, consumer=ConsumerId(replica, p.consumer.worker)) for p in twin]
        )
    groups = {rank: rank_schedule(manifest, rank) for rank in range(num_ranks)}
    plans = tuple(plan for plans in replicas for plan in plans)
    standing = {
        rank: draw(st.lists(st.sampled_from(its))) if its else [] for rank, its in groups.items()
    }
    return Fleet(plans, groups, draw(st.integers(0, 2)), standing)


@settings(max_examples=num_examples(120))
@given(fleets(), SEEDS, st.integers(1, 3), st.sampled_from((0.0, 0.3)), st.sampled_from((0, 8)))
def test_every_epoch_is_finished_by_everybody(
    fleet: Fleet, seed: int, num_epochs: int, rate: float, num_stale_events: int
) -> None:
    faults = Faults(duplicate_rate=rate, num_stale_events=num_stale_events)
    report = fleet.run(seed, num_epochs, faults)
    assert not report.failures
    assert {*report.consumers.values(), *report.producers.values()} == {EpochState.FINISHED}
    joined: frozenset[ConsumerId] = frozenset()
    for epoch in range(1, num_epochs + 1):
        assert joined <= report.commits[epoch]  # whoever took part once goes on doing so
        joined = report.commits[epoch]
        assert joined
    for plan in fleet.plans:  # one READY and one DONE a chunk, and nothing else
        num_epochs = sum(plan.consumer in joined for joined in report.commits.values())
        assert report.num_doorbells[plan.consumer] == 2 * len(plan.chunks) * num_epochs


@settings(max_examples=num_examples(120))
@given(st.data(), fleets(), SEEDS, st.integers(1, 3))
def test_the_others_finish_when_replicas_are_dropped(
    data: st.DataObject, fleet: Fleet, seed: int, num_epochs: int
) -> None:
    drops = data.draw(st.lists(st.sampled_from(fleet.replicas), min_size=1, max_size=2))
    faults = Faults(drops=tuple(drops), rejoin=data.draw(st.booleans()), duplicate_rate=0.1)
    report = fleet.run(seed, num_epochs, faults)
    live = [c for c in report.consumers if c.replica not in drops or faults.rejoin]
    assert {report.consumers[c] for c in live} <= {EpochState.FINISHED}
    assert len(report.commits) == num_epochs or not live
    for epoch, reason in report.failures.items():
        assert (reason, report.commits[epoch]) == ("every consumer was dropped", frozenset())


@settings(max_examples=num_examples(200))
@given(
    st.data(),
    fleets(),
    SEEDS,
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 1),
    st.integers(0, 1),
)
def test_whatever_goes_wrong_ends_quiesced_and_the_next_epoch_heals(
    data: st.DataObject,
    fleet: Fleet,
    seed: int,
    num_epochs: int,
    num_aborts: int,
    num_read_failures: int,
    num_pack_failures: int,
    num_replacements: int,
) -> None:
    drops = data.draw(st.lists(st.sampled_from(fleet.replicas), max_size=2))
    faults = Faults(
        drops=tuple(drops),
        rejoin=True,
        num_aborts=num_aborts,
        num_read_failures=num_read_failures,
        num_pack_failures=num_pack_failures,
        num_replacements=num_replacements,
        num_stale_events=4,
        duplicate_rate=0.1,
    )
    report = fleet.run(seed, num_epochs, faults)
    assert len(report.commits) == num_epochs
    num_causes = num_aborts + num_read_failures + num_pack_failures + num_replacements + len(drops)
    assert len(report.failures) <= num_causes
    for epoch, committed in report.commits.items():
        assert committed or epoch in report.failures


def test_equal_seeds_give_equal_runs() -> None:
    plans, groups = small_fleet()
    faults = Faults(drops=(0,), rejoin=True, num_aborts=1, duplicate_rate=0.2)
    first, again = (
        simulate(plans, groups, lookahead=1, seed=7, num_epochs=2, faults=faults) for _ in range(2)
    )
    assert first == again


def test_the_lookahead_is_used() -> None:
    plans, groups = small_fleet()
    most = max(simulate(plans, groups, lookahead=2, seed=seed).max_resident for seed in range(20))
    assert most == 3


def test_standing_groups_do_not_wait_for_the_lookahead() -> None:
    plans, groups = small_fleet()
    reports = [
        simulate(plans, groups, lookahead=0, seed=seed, standing=groups) for seed in range(20)
    ]
    assert {report.max_resident for report in reports} == {0}
    assert all(report.violations == () for report in reports)


def test_equal_plans_are_packed_once() -> None:
    plans, groups = small_fleet()
    assert len({plan.digest for plan in plans}) == 2 < len(plans)
    reports = (simulate(plans, groups, lookahead=1, seed=seed) for seed in range(50))
    report = next(each for each in reports if len(each.commits[1]) == len(plans))
    assert report.num_packs == sum(len(plan.chunks) for plan in plans[:2])


def test_a_fleet_without_consumers_finishes() -> None:
    report = simulate([], {0: [0, 1], 1: [1]}, lookahead=0, seed=0, num_epochs=2)
    assert report.violations == ()
    assert set(report.producers.values()) == {EpochState.FINISHED}


def test_a_fleet_whose_consumers_are_all_gone_waits_for_new_ones() -> None:
    plans, groups = small_fleet()
    faults = Faults(drops=(0, 1, 2))
    reports = [
        simulate(plans, groups, lookahead=1, seed=s, num_epochs=2, faults=faults) for s in range(20)
    ]
    assert all(report.violations == () for report in reports)
    assert any(len(report.commits) < 2 for report in reports)


def test_too_many_steps_are_reported() -> None:
    plans, groups = small_fleet()
    report = simulate(plans, groups, lookahead=1, seed=0, max_steps=10)
    assert report.violations == ("not over after 10 steps",)


def test_two_plans_that_claim_one_digest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, groups = small_fleet()
    monkeypatch.setattr(SyncPlan, "digest", "0" * 64)
    plans = [replace(plans[0]), replace(plans[1], chunks=plans[1].chunks[:-1])]
    report = simulate(plans, groups, lookahead=1, seed=0)
    assert "differs in" in report.violations[0]
