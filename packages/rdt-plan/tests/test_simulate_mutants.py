"""What the rules are for: without any one of them something goes wrong, and is seen."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rdt_plan._serve_stream import ServeStream
from rdt_plan._simulated_producer import SimulatedProducer
from rdt_plan._simulated_rendezvous import SimulatedRendezvous
from rdt_plan._simulated_rings import SimulatedRings
from rdt_plan.consumer_epoch import ConsumerEpoch, Scatter
from rdt_plan.direct import DirectRule
from rdt_plan.doorbell import Doorbell
from rdt_plan.epoch import EpochState, Finished
from rdt_plan.groups import rank_schedule
from rdt_plan.identity import ConsumerId
from rdt_plan.lanes import lanes_of
from rdt_plan.mailbox import Mailbox, Verdict
from rdt_plan.manifest import Manifest, ParamMeta
from rdt_plan.placement import Placement
from rdt_plan.plan import build_plan
from rdt_plan.producer_epoch import ProducerEpoch, Ready
from rdt_plan.simulate import Faults, simulate
from rdt_plan.slices import whole
from rdt_plan.slots import SlotRing, SlotState
from rdt_plan.testing import small_fleet
from rdt_plan.transitions import ChunkEvent, ChunkState, ServeState

NUM_SEEDS = 40


def violations(faults: Faults, direct: str = "", num_modules: int = 1) -> list[str]:
    """The first violation of every run that has one; the rest is `small_fleet`'s."""
    plans, groups = small_fleet(direct=direct, num_modules=num_modules)
    runs = (
        simulate(plans, groups, lookahead=1, seed=seed, num_epochs=2, faults=faults)
        for seed in range(NUM_SEEDS)
    )
    return [report.violations[0] for report in runs if report.violations]


# ---- the receive ring and the consumer ----------------------------------------------------------


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


class FinishedWithoutDirect(ConsumerEpoch):
    """It ends with the last slotted chunk."""

    def _finish(self) -> list:
        missing = [i for i, s in enumerate(self._states) if s is not ChunkState.INSTALLED]
        if any(index in self._slot_of for index in missing):
            return []
        self._num_installed = len(self._chunks)
        self._in_flight.clear()
        return super()._finish()


class DirectBeforeReady(ConsumerEpoch):
    """The source is there anyway, so why wait for READY?"""

    def begin(self) -> list:
        actions = super().begin()
        for chunk in self._chunks:
            if chunk.is_direct:
                actions += super().ready(chunk.owner, chunk.serve.seq)
        return actions


class EarlyReadyLost(Mailbox):
    def accept(self, doorbell: Doorbell) -> Verdict:
        verdict = super().accept(doorbell)
        return Verdict.DROPPED if verdict is Verdict.KEPT else verdict

    def open(self, session: bytes, epoch: int) -> list:
        super().open(session, epoch)
        return []


class KeepsARingful(Mailbox):
    """Of what comes early it keeps as much as the slots hold, as if nothing were direct."""

    def __init__(self, kept_per_sender: int) -> None:
        super().__init__(2)


class AnyEpoch(Mailbox):
    """Doorbells of earlier epochs are delivered like those of the open one."""

    def accept(self, doorbell: Doorbell) -> Verdict:
        verdict = super().accept(doorbell)
        return Verdict.DELIVER if verdict is Verdict.DROPPED else verdict


# ---- serve rings and the producer ---------------------------------------------------------------


class PackedBeforeDone(ServeStream):
    def has_free_slot(self, seq: int) -> bool:
        return True


class FirstDoneCounts(ServeStream):
    """A slot is free when one of its readers has read it."""

    def owes(self, reader: ConsumerId, seq: int) -> bool:
        return super().owes(reader, seq) and self.states[seq] is not ServeState.READ

    def read(self, reader: ConsumerId, seq: int) -> bool:
        super().read(reader, seq)
        return True


class DroppedReaderCounts(ServeStream):
    def leave(self, reader: ConsumerId) -> list[int]:
        self.readers.remove(reader)
        return []


class DroppedReaderKeepsItsSlots(ServeStream):
    """It stops counting, but the chunks that it alone had yet to read stay."""

    def leave(self, reader: ConsumerId) -> list[int]:
        super().leave(reader)
        return []


class OneReaderIsTold(ProducerEpoch):
    def packed(self, ring: str, seq: int) -> list:
        actions = super().packed(ring, seq)
        told = [action for action in actions if isinstance(action, Ready)]
        return [action for action in actions if action not in told[1:]]


class ReadyWhenEnqueued(ProducerEpoch):
    def pack_enqueued(self, ring: str, seq: int) -> list:
        readers = self._streams[ring].readers
        return super().pack_enqueued(ring, seq) + [Ready(reader, seq) for reader in readers]


class WithoutCredit(ProducerEpoch):
    def may_publish(self) -> bool:
        return self.state is EpochState.RUNNING and self._num_published < len(self._groups)


class HoldsTheLastGroupBack(ProducerEpoch):
    """As if each replica read something of every group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_incomplete = max(len(self._groups) - 1, 0)


class HoldsNothingBack(ProducerEpoch):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_incomplete = len(self._groups)


class ReleasedUnderPacks(ProducerEpoch):
    """The groups of a ring without readers are released although packs still read them."""

    def drop(self, consumer: ConsumerId, reason: str) -> list:
        ring = self._ring_of[consumer]
        if self._streams[ring].readers == [consumer]:
            for holders in self._holders.values():
                holders.difference_update({key for key in holders if key[0] == ring})
        return super().drop(consumer, reason)


class ReleasedWhenReady(ProducerEpoch):
    """A group whose chunks are all READY is released: right for slots, but its sources are read."""

    def packed(self, ring: str, seq: int) -> list:
        actions = super().packed(ring, seq)
        self._holders[self._streams[ring].chunks[seq].group].discard((ring, seq))
        return actions + (self._release() if self.state is EpochState.RUNNING else [])


class ReleasedByTheFirstReader(ProducerEpoch):
    """A source may change when one of its readers has read it."""

    def done(self, consumer: ConsumerId, seq: int) -> list:
        actions = super().done(consumer, seq)
        ring = self._ring_of[consumer]
        if self.state is EpochState.RUNNING and self._streams[ring].chunks[seq].is_direct:
            self._holders[self._streams[ring].chunks[seq].group].discard((ring, seq))
            actions += self._release()
        return actions


class ReleasedWhenPacking(ProducerEpoch):
    """A group is released when the last pack of it starts, not when it was read."""

    def _advance(self, ring: str) -> list:
        actions = super()._advance(ring)
        for pack in actions:
            group = self._streams[ring].chunks[pack.seq].group
            self._holders[group].discard((ring, pack.seq))
        return actions


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


class ChangesSourcesWhenQuiesced(SimulatedProducer):
    """It knows that its epoch failed, but the rendezvous does not, and may grant a commit."""

    def _may_change(self) -> bool:
        return self.epoch.state is EpochState.QUIESCED


class IdleTooSoon(SimulatedRings):
    """The memory of a ring goes to the next one although somebody still reads it."""

    def dismiss(self, incarnation: str) -> None:
        if self.serves(incarnation):
            digest = self._served[incarnation][1]
            self._idle.append(self.rings[digest].arena)
        super().dismiss(incarnation)


class FencedMayCommit(SimulatedRendezvous):
    def may_commit(self, who: ConsumerId, incarnation: str, epoch: int) -> bool:
        return epoch == self.last and epoch not in self.failures


class NextEpochOpensEarly(SimulatedRendezvous):
    @property
    def is_open(self) -> bool:
        return False


DROP = Faults(drops=(0, 1))
REJOIN = Faults(drops=(0, 1, 2), rejoin=True)
ABORT = Faults(num_aborts=1)
STALE, REPEATS = Faults(num_stale_events=30), Faults(duplicate_rate=0.7)
CONSUMER, PRODUCER = "rdt_plan._simulated_consumer", "rdt_plan._simulated_producer"
MACHINE, RING = f"{PRODUCER}.ProducerEpoch", "rdt_plan.producer_epoch.ServeStream"
SLOTS, RENDEZVOUS = "rdt_plan.consumer_epoch.SlotRing", "rdt_plan.simulate.SimulatedRendezvous"


@pytest.mark.parametrize(
    ("direct", "num_modules"), [("", 1), ("a", 1), ("ab", 1), ("", 5), ("b", 5)]
)
@pytest.mark.parametrize("faults", [DROP, REJOIN, ABORT, STALE])
def test_without_a_mutant_nothing_is_caught(faults: Faults, direct: str, num_modules: int) -> None:
    assert violations(faults, direct, num_modules) == []


def test_lanes_that_part_a_module_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_modules(chunks: Iterable[tuple[int, Iterable[object]]]) -> dict[int, int]:
        return lanes_of((owner, [t for t in ties if type(t) is int]) for owner, ties in chunks)

    monkeypatch.setattr("rdt_plan.plan.lanes_of", without_modules)
    found = violations(Faults(), num_modules=2)
    assert any(re.search(r"scattered chunk \d+ of m[01] after chunk", each) for each in found), (
        found
    )


def test_sources_that_change_before_a_failure_is_known_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One direct chunk, read while its producer gives up, is committed before anybody hears."""
    manifest = Manifest.build([ParamMeta("w", "int8", (1,))])
    copy = Placement(whole(manifest.param("w")), "m", "w", 0, (1,), (1,), "int8", (1,))
    rule = DirectRule({0: frozenset({"w"})}, frozenset({("m", "w")}))
    plan = build_plan(manifest, [copy], ConsumerId(0, 0), num_workers=1, direct=rule)

    def found() -> list[str]:
        runs = (simulate([plan], {0: [0]}, lookahead=0, seed=s, faults=ABORT) for s in range(100))
        return [each for report in runs for each in report.violations]

    assert found() == []
    monkeypatch.setattr("rdt_plan.simulate.SimulatedProducer", ChangesSourcesWhenQuiesced)
    changed = "consumer r0w0#0, epoch 1: committed chunks [0], whose sources changed"
    assert found()
    assert all(each.startswith(changed) for each in found())


@pytest.mark.parametrize(
    ("place", "mutant", "faults", "says"),
    [
        (SLOTS, FreedBeforeEnqueued, STALE, "in its slot"),
        (SLOTS, FreedByAnOlderGeneration, STALE, "in its slot"),
        (SLOTS, FreedWhenEnqueued, Faults(), "in its slot"),
        (SLOTS, NeverFreed, Faults(), "still used by"),
        (f"{CONSUMER}.ConsumerEpoch", QuiescedWithReads, ABORT, "with something in flight"),
        (f"{CONSUMER}.ConsumerEpoch", FinishedWhenEnqueued, Faults(), "in its slot"),
        (f"{CONSUMER}.ConsumerEpoch", HandsOutWhatLands, Faults(), "scattered chunk"),
        (f"{CONSUMER}.ConsumerEpoch", LosesAChunk, Faults(), "finished with chunks"),
        (f"{CONSUMER}.Mailbox", EarlyReadyLost, Faults(), "READY not received"),
        (f"{CONSUMER}.Mailbox", AnyEpoch, REPEATS, "is not read"),
        (f"{PRODUCER}.Mailbox", AnyEpoch, REPEATS, "before its READY"),
        (RING, PackedBeforeDone, Faults(), "in its slot"),
        (RING, FirstDoneCounts, Faults(), "in its slot"),
        (RING, DroppedReaderCounts, DROP, "DONE of"),
        (RING, DroppedReaderKeepsItsSlots, DROP, "nothing can happen any more"),
        (MACHINE, OneReaderIsTold, Faults(), "READY not received"),
        (MACHINE, ReadyWhenEnqueued, Faults(), "in its slot"),
        (MACHINE, WithoutCredit, Faults(), "are resident"),
        (MACHINE, ReleasedUnderPacks, DROP, "not resident"),
        (MACHINE, ReleasedWhenPacking, Faults(), "not resident"),
        (MACHINE, NeverReleased, Faults(), "nothing can happen any more"),
        (MACHINE, FinishedWithGroups, Faults(), "were never released"),
        (MACHINE, DropForgotten, DROP, "for a dropped consumer"),
        (MACHINE, QuiescedWithPacks, ABORT, "with a pack in flight"),
        (f"{PRODUCER}.SimulatedRings", IdleTooSoon, REJOIN, "in its slot"),
        (RENDEZVOUS, FencedMayCommit, DROP, "was granted epoch"),
        (RENDEZVOUS, NextEpochOpensEarly, Faults(), "was never committed by"),
    ],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    mutant: Callable[..., object],
    faults: Faults,
    says: str,
) -> None:
    monkeypatch.setattr(place, mutant)
    found = violations(faults)
    assert any(says in each for each in found), found


@pytest.mark.parametrize("direct", ["a", "ab"])
@pytest.mark.parametrize(
    ("place", "mutant", "faults", "says"),
    [
        (f"{CONSUMER}.ConsumerEpoch", QuiescedWithReads, ABORT, "with something in flight"),
        (f"{CONSUMER}.ConsumerEpoch", FinishedWithoutDirect, Faults(), "finished with chunks"),
        (f"{CONSUMER}.ConsumerEpoch", DirectBeforeReady, Faults(), "before its READY"),
        (f"{CONSUMER}.Mailbox", KeepsARingful, Faults(), "READY not received"),
        (f"{CONSUMER}.Mailbox", EarlyReadyLost, Faults(), "READY not received"),
        (MACHINE, ReadyWhenEnqueued, Faults(), "sources changed"),
        (MACHINE, ReleasedWhenReady, Faults(), "sources changed"),
        (MACHINE, ReleasedByTheFirstReader, Faults(), "sources changed"),
        (MACHINE, DropForgotten, DROP, "for a dropped consumer"),
    ],
)
def test_a_mutant_is_caught_by_what_is_read_directly(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    mutant: Callable[..., object],
    faults: Faults,
    says: str,
    direct: str,
) -> None:
    monkeypatch.setattr(place, mutant)
    found = violations(faults, direct)
    assert any(says in each for each in found), found


@pytest.mark.parametrize("mutant", [HoldsTheLastGroupBack, HoldsNothingBack])
def test_a_replica_that_commits_before_standing_tensors_were_looked_at_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: type[ProducerEpoch]
) -> None:
    """Two ranks hold the same, so the worker reads the last group of one of them elsewhere."""
    params = [ParamMeta(f"l.{each}.w", "int8", (1,), (0, 1)) for each in range(2)]
    manifest = Manifest.build(params)
    copies = [Placement(s, s.name, "w", 0, (1,), (1,), "int8", (1,)) for s in map(whole, params)]
    names = frozenset(param.name for param in params)
    rule = DirectRule({0: names, 1: names}, frozenset((name, "w") for name in names))
    plan = build_plan(manifest, copies, ConsumerId(0, 0), num_workers=1, direct=rule)
    assert {chunk.owner for chunk in plan.chunks} == {0, 1}
    groups = {rank: rank_schedule(manifest, rank) for rank in range(2)}

    def found() -> list[str]:
        faults = Faults(num_replacements=2)
        runs = (
            simulate(
                [plan], groups, lookahead=0, seed=s, num_epochs=4, faults=faults, standing=groups
            )
            for s in range(5 * NUM_SEEDS)
        )
        return [each for report in runs for each in report.violations]

    assert found() == []
    monkeypatch.setattr(MACHINE, mutant)
    assert any("sources changed" in each for each in found())
