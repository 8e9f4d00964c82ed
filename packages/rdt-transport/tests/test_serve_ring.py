"""Consumers of one plan read one ring, over both wires: bytes compared, packs counted."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rdt_transport.errors import TornError
from rdt_transport.memory import Arena
from rdt_transport.rendezvous import ConsumerDropped, JobSettings
from rdt_transport.serve_ring import ServeRing
from rdt_transport.testing.fleet import Fleet
from rdt_transport.testing.sample_job import (
    draw,
    expect_exact,
    model,
    open_fleet,
    shards,
    shards_of,
    stable_tensors,
)
from rdt_transport.testing.wire_pair import MakeWire, expect_bytes

WAIT_SECONDS = 20.0
MANIFEST = model(num_layers=4, owners=((0,), (1,)))
JOB = JobSettings(num_producers=2, num_replicas=2, max_chunk_bytes=64)
HALVES = (0, 1, 0)  # by consumer: r0w0 and r1w0 hold the same half, hence have the same plan


@contextmanager
def fleet_of(make_wire: MakeWire) -> Iterator[Fleet]:
    writes = [shards(MANIFEST, half, 2) for half in HALVES]
    with open_fleet(make_wire, MANIFEST, JOB, replicas=[2, 1], writes=writes) as fleet:
        first, other, same = (consumer.plan.digest for consumer in fleet.consumers)
        assert first == same != other
        yield fleet


def expect_halves(fleet: Fleet, seed: int, *indices: int) -> None:
    for index in indices:
        for place, tensor in shards_of(draw(MANIFEST, seed), HALVES[index], 2).items():
            expect_bytes(fleet.sinks[index].destinations[place], tensor)


def whole_plans(fleet: Fleet) -> Counter[tuple[int, str, int]]:
    """Every chunk of every plan once, by owner, plan digest and seq."""
    plans = {consumer.plan.digest: consumer.plan for consumer in fleet.consumers}
    return Counter(
        (chunk.owner, digest, chunk.serve.seq)
        for digest, plan in plans.items()
        for chunk in plan.chunks
    )


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str, int]]:
    """How often each chunk was packed."""
    found: Counter[tuple[int, str, int]] = Counter()
    pack = ServeRing.pack

    def counted(ring: ServeRing, seq: int, sources: dict) -> None:
        found[ring.table.owner, ring.table.plan_digest, seq] += 1
        pack(ring, seq, sources)

    monkeypatch.setattr(ServeRing, "pack", counted)
    return found


def test_a_shared_chunk_is_packed_once(make_wire: MakeWire, packs: Counter) -> None:
    with fleet_of(make_wire) as fleet:
        for seed in (1, 2):
            packs.clear()
            fleet.sync(draw(MANIFEST, seed))
            expect_halves(fleet, seed, 0, 1, 2)
            assert packs == whole_plans(fleet)
        for producer in fleet.producers:
            served = [producer._rings.get(each.incarnation) for each in fleet.consumers]
            assert served[0].ring is served[2].ring is not served[1].ring


@pytest.mark.parametrize("fallen", [0, 1])
def test_the_others_finish_when_a_replica_is_dropped_in_an_epoch(
    make_wire: MakeWire, packs: Counter, fallen: int
) -> None:
    """The dropped reader holds a slot that the other one needs: it must stop counting at once."""
    with fleet_of(make_wire) as fleet:
        indices = [i for i in range(3) if fleet.identity(i)[0].replica == fallen]
        others = [i for i in range(3) if i not in indices]
        slow = fleet.sinks[indices[0]]
        stuck, release = threading.Event(), threading.Event()

        def hold(chunk: object) -> None:
            stuck.set()
            release.wait(WAIT_SECONDS)

        slow.before = hold
        fleet.begin()
        dropped = [fleet.consumers[i] for i in indices]

        def drop() -> None:
            assert stuck.wait(WAIT_SECONDS)
            who, incarnation = dropped[0].plan.consumer, dropped[0].incarnation.hex()
            fleet.clients[0].drop(who, incarnation, "too slow")

        dropper = threading.Thread(target=drop)
        dropper.start()
        fleet.finish(draw(MANIFEST, 1), [fleet.consumers[i] for i in others])
        dropper.join()
        expect_halves(fleet, 1, *others)
        assert set(packs.values()) == {1}
        release.set()
        for consumer in dropped:  # what it read since may be anything
            with pytest.raises(TornError, match="too slow"):
                consumer.wait(WAIT_SECONDS)
            with pytest.raises(TornError):
                consumer.commit(WAIT_SECONDS)
            consumer.close()
        slow.before = None
        for index in indices:
            fleet.attach(index)
        packs.clear()
        fleet.sync(draw(MANIFEST, 2))
        expect_halves(fleet, 2, 0, 1, 2)
        assert packs == whole_plans(fleet)


def test_a_pack_that_fails_for_nobody_fails_no_epoch(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet_of(make_wire) as fleet:
        fallen, digest = fleet.consumers[1], fleet.consumers[1].plan.digest
        pack = ServeRing.pack

        def fail(ring: ServeRing, seq: int, sources: dict) -> None:
            if ring.table.plan_digest != digest:
                pack(ring, seq, sources)
                return
            who, incarnation = fallen.plan.consumer, fallen.incarnation.hex()
            fleet.clients[0].drop(who, incarnation, "broken")
            machine = fleet.producers[ring.table.owner]._serving._machine
            until(lambda: not machine._streams[digest].readers)
            raise ValueError("no such weight")

        monkeypatch.setattr(ServeRing, "pack", fail)
        fleet.begin()
        fleet.finish(draw(MANIFEST, 1), [fleet.consumers[2]])
        expect_halves(fleet, 1, 2)


def test_the_slots_of_a_ring_are_idle_when_its_last_reader_left(make_wire: MakeWire) -> None:
    with fleet_of(make_wire) as fleet:
        rings = fleet.producers[0]._rings
        before = {id(ring.arena) for ring in rings._rings.values()}
        for index, num_left in ((2, 2), (0, 1)):
            fleet.consumers[index].close()
            fleet.clients[2 + index].leave()
            settle(fleet, index)
            assert len(rings._rings) == num_left
        assert len(rings._idle) == 1
        fleet.attach(2)
        fleet.attach(0)
        assert {id(ring.arena) for ring in rings._rings.values()} == before
        fleet.sync(draw(MANIFEST, 1))
        expect_halves(fleet, 1, 0, 1, 2)


def test_the_slots_of_a_ring_that_cannot_be_prepared_are_idle(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer is refused; the next one's ring takes them, and is prepared as well."""

    def fail(ring: ServeRing) -> None:
        raise RuntimeError("no compiler")

    with fleet_of(make_wire) as fleet:
        rings = fleet.producers[0]._rings
        before = {id(ring.arena) for ring in rings._rings.values()}
        fleet.consumers[1].close()
        fleet.clients[3].leave()
        settle(fleet, 1)
        with monkeypatch.context() as patch:
            patch.setattr(rings, "_device", "cuda")  # where kernels have to be compiled
            patch.setattr(ServeRing, "prepare", fail)
            with pytest.raises(TornError, match="no compiler"):
                fleet.attach(1)
        until(lambda: len(rings._idle) == 1)
        assert len(rings._rings) == 1
        fleet.consumers[0].close()  # its replica was dropped
        fleet.attach(1)
        fleet.attach(0)
        assert {id(ring.arena) for ring in rings._rings.values()} == before
        fleet.sync(draw(MANIFEST, 1))
        expect_halves(fleet, 1, 0, 1, 2)


def test_a_ring_of_direct_chunks_takes_no_slots(make_wire: MakeWire) -> None:
    """Neither new ones nor those that are idle: the next ring that needs some gets them."""
    manifest = model()
    sources = [stable_tensors(manifest, 0)]
    with open_fleet(make_wire, manifest, JobSettings(1), [1], sources=sources, live=()) as fleet:
        rings = fleet.producers[0]._rings

        def arena_of(live: tuple[()] | None) -> object:
            """Of the one ring, once the consumer has come again."""
            fleet.consumers[0].close()
            fleet.clients[-1].leave()
            settle(fleet, 0)
            fleet._live = live
            fleet.attach(0)
            (ring,) = rings._rings.values()
            return ring.arena

        (staged,) = (ring.arena for ring in rings._rings.values())
        assert staged is not None
        assert arena_of(live=None) is None
        assert rings._idle == [staged]
        fleet.sync(draw(manifest, 1))
        expect_exact(fleet, draw(manifest, 1))
        assert arena_of(live=()) is staged
        fleet.sync(draw(manifest, 2))
        expect_exact(fleet, draw(manifest, 2))


def test_a_ring_takes_the_smallest_idle_slots_that_fit(make_wire: MakeWire) -> None:
    """Or the next one, of larger chunks, would have to make new ones."""
    with fleet_of(make_wire) as fleet:
        rings = fleet.producers[0]._rings
        (table,) = {ring.table for ring in rings._rings.values() if len(ring.readers) == 2}
        large, small = (Arena(table.num_slots, table.slot_bytes + more) for more in (64, 1))
        rings._idle = [large, small]
        assert rings._arena(table) is small
        assert rings._arena(table) is large
        assert rings._idle == []


def settle(fleet: Fleet, index: int) -> None:
    """Wait until no producer serves that consumer any more."""
    gone = fleet.consumers[index].incarnation
    until(lambda: all(producer._rings.get(gone) is None for producer in fleet.producers))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_end_of_an_incarnation_does_not_touch_its_successor(make_wire: MakeWire) -> None:
    """News of an earlier incarnation may come when the next one has its place in an epoch."""
    with fleet_of(make_wire) as fleet:
        earlier = fleet.consumers[2]
        earlier.close()
        fleet.clients[4].leave()
        settle(fleet, 2)
        fleet.attach(2)
        fleet.begin()
        for producer in fleet.producers:
            late = ConsumerDropped(earlier.plan.consumer, earlier.incarnation.hex(), "late news")
            producer.on_event(late)
        fleet.finish(draw(MANIFEST, 1), fleet.consumers)
        expect_halves(fleet, 1, 0, 1, 2)
