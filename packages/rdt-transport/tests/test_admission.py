"""Consumers that cannot be served: dropped with the reason, and nobody else notices."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rdt_plan import (
    WIRE_VERSION,
    ChunkTable,
    ConsumerId,
    Doorbell,
    Kind,
    Manifest,
    ParamMeta,
    Subscription,
    build_plan,
)
from rdt_transport import serve_rings
from rdt_transport.errors import RendezvousError, SyncAbortedError, TornError, WireError
from rdt_transport.rendezvous import JobSettings, RendezvousClient
from rdt_transport.testing.fleet import Fleet
from rdt_transport.testing.job_records import incarnation
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.sample_job import (
    draw,
    expect_exact,
    in_process,
    open_fleet,
    shards,
)
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.base import PeerAddress, Wire
from rdt_transport.wire.nixl import NixlWire

WAIT_SECONDS = 20.0
STRANGER = ConsumerId(1, 0)
MANIFEST = Manifest.build([ParamMeta("w", "float32", (4, 4))])


def table() -> ChunkTable:
    """Of another plan than that of the fleet's consumer, whose one chunk has 64 bytes."""
    writes = shards(MANIFEST, 0, 1)
    return build_plan(MANIFEST, writes, STRANGER, num_workers=1, max_chunk_bytes=32).table(0)


def subscription(address: PeerAddress, chunks: ChunkTable) -> Subscription:
    return Subscription(
        consumer=STRANGER,
        num_workers=1,
        incarnation=incarnation(),
        wire_name=address.name,
        metadata=address.metadata,
        wire_version=WIRE_VERSION,
        plan_digest=chunks.plan_digest,
        tables=(chunks,),
    )


def fleet_of(make_wire: MakeWire) -> AbstractContextManager[Fleet]:
    return open_fleet(make_wire, MANIFEST, JobSettings(num_producers=1, num_replicas=2), [1])


def sync(fleet: Fleet) -> None:
    weights = draw(MANIFEST, secrets.randbits(32))
    fleet.sync(weights)
    expect_exact(fleet, weights)


def settle(fleet: Fleet) -> None:
    """Wait until the serving thread has done what was given to it."""
    done = threading.Event()
    fleet.producers[0]._thread.run_when_quiet(done.set)
    assert done.wait(WAIT_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def silent(make_wire: MakeWire) -> Iterator[PeerAddress]:
    """A wire that does not answer: in this process a closed one, with NIXL one not polled."""
    with PumpedWire(lambda: make_wire("silent"), poll_seconds=60.0) as pumped:
        address = pumped.call(lambda wire: wire.address())
        if make_wire is not NixlWire:
            pumped.call(lambda wire: wire.close())
        yield address


def test_a_newcomer_that_does_not_answer_delays_nobody(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs run between the slices; at last it is given up, and its ring waits for the next."""
    with (
        silent(make_wire) as address,
        fleet_of(make_wire) as fleet,
        RendezvousClient(fleet.host.address) as client,
    ):
        rings = fleet.producers[0]._rings
        newcomer = subscription(address, table())
        client.subscribe(newcomer, WAIT_SECONDS)
        until(lambda: list(rings._newcomers) == [bytes.fromhex(newcomer.incarnation)])
        for _ in range(3):
            sync(fleet)
        assert rings._newcomers
        monkeypatch.setattr(serve_rings, "ADMIT_TIMEOUT_SECONDS", 0.5)
        with pytest.raises(TornError, match="did not answer for"):
            client.offers(STRANGER, WAIT_SECONDS)
        settle(fleet)
        assert len(rings._idle) == 1 and not rings._newcomers
        monkeypatch.undo()
        sync(fleet)


def test_a_newcomer_that_goes_is_given_up_at_once(make_wire: MakeWire) -> None:
    with silent(make_wire) as address, fleet_of(make_wire) as fleet:
        rings = fleet.producers[0]._rings
        with RendezvousClient(fleet.host.address) as client:
            client.subscribe(subscription(address, table()), WAIT_SECONDS)
            until(lambda: len(rings._newcomers) == 1)
        until(lambda: len(rings._idle) == 1 and not rings._newcomers)
        sync(fleet)


WRONG = [
    ({"slot_bytes": 1 << 62}, "expected slot_bytes=32"),
    ({"slot_bytes": (1 << 63) - 16}, "expected slot_bytes=32"),
    ({"slot_bytes": 0}, "expected slot_bytes=32"),
    ({"plan_digest": "f" * 64}, rf"plan_digest {table().plan_digest}, found {'f' * 64}"),
    ({"num_slots": 3}, "of r1w0 for rank 0: expected the job's num_slots 2, found 3"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_table_that_is_wrong_is_refused_before_memory_is_allocated(
    wrong: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the producer itself, whatever the rendezvous let through."""
    make_wire = in_process()
    with fleet_of(make_wire) as fleet, RendezvousClient(fleet.host.address) as client:
        address = PeerAddress(make_wire("wrong").name, b"")
        newcomer = subscription(address, table())
        held: list[Subscription] = []
        rings = fleet.producers[0]._rings
        admit = rings.admit
        monkeypatch.setattr(rings, "admit", lambda each: held.append(each) or True)
        client.subscribe(newcomer, WAIT_SECONDS)
        until(lambda: bool(held))
        monkeypatch.setattr(serve_rings, "Arena", None)
        assert admit(replace(newcomer, tables=(replace(table(), **wrong),)))
        with pytest.raises(TornError, match=says):
            client.offers(STRANGER, WAIT_SECONDS)
        sync(fleet)


def test_a_digest_that_two_tables_claim_is_refused_to_the_later_one() -> None:
    make_wire = in_process()
    with fleet_of(make_wire) as fleet, RendezvousClient(fleet.host.address) as client:
        digest = fleet.consumers[0].plan.digest
        address = PeerAddress(make_wire("liar").name, b"")
        client.subscribe(subscription(address, replace(table(), plan_digest=digest)), WAIT_SECONDS)
        says = (
            f"r1w0 claims plan {digest}, as consumer r0w0 does, .*slot_bytes: expected 64, found 32"
        )
        with pytest.raises(TornError, match=says):
            client.offers(STRANGER, WAIT_SECONDS)
        sync(fleet)


@pytest.mark.parametrize("step", ["meet", "offer", "check"])
def test_any_error_drops_the_consumer_and_fails_no_epoch(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever type it has; the ring is kept for the next one, and the peer is left."""

    def fail(*args: object) -> None:
        raise (RendezvousError if step == "offer" else UnicodeError)("not as it should be")

    make_wire = in_process()
    with fleet_of(make_wire) as fleet, RendezvousClient(fleet.host.address) as client:
        producer = fleet.producers[0]
        match step:
            case "meet":
                monkeypatch.setattr(producer._progress.peers, "meet", fail)
            case "offer":
                monkeypatch.setattr(producer._client, "offer", fail)
            case "check":
                monkeypatch.setattr(serve_rings, "check_table", fail)
        stranger = make_wire("stranger")
        fleet.begin()
        client.subscribe(subscription(stranger.address(), table()), WAIT_SECONDS)
        weights = draw(MANIFEST, 1)
        fleet.publish(0, weights)
        fleet.producers[0].finish(WAIT_SECONDS)
        fleet.consumers[0].wait(WAIT_SECONDS)
        with pytest.raises(TornError, match=r"cannot serve it: .*not as it should be"):
            client.offers(STRANGER, WAIT_SECONDS)
        settle(fleet)
        assert len(producer._rings._idle) == (step != "check")
        with pytest.raises(WireError, match="not connected to"):
            producer._progress.call(lambda wire: wire.notify(stranger.name, b"x"), WAIT_SECONDS)
        fleet.consumers[0].commit(WAIT_SECONDS)
        sync(fleet)
        stranger.close()


def test_a_stranger_cannot_ring_for_a_consumer_or_a_producer() -> None:
    """A doorbell counts only from the wire that its sender's incarnation was announced with."""
    make_wire = in_process()
    with fleet_of(make_wire) as fleet:
        sync(fleet)
        producer, consumer = fleet.producers[0], fleet.consumers[0]
        record = fleet.begin()
        session = bytes.fromhex(record.session)
        for endpoint, kind in ((producer, Kind.DONE), (consumer, Kind.READY)):
            other = consumer if endpoint is producer else producer
            forged = Doorbell(session, 2, other.incarnation, endpoint.incarnation, kind, 0)

            def ring(wire: Wire, endpoint=endpoint, forged=forged) -> None:
                endpoint.on_doorbell(wire, "stranger", forged)

            endpoint._progress.call(ring, WAIT_SECONDS)  # or the machine refuses it: not READY yet
        weights = draw(MANIFEST, 1)
        fleet.publish(0, weights)
        producer.finish(WAIT_SECONDS)
        consumer.wait(WAIT_SECONDS)
        expect_exact(fleet, weights)


def test_an_epoch_begins_after_an_admission_that_is_under_way() -> None:
    with fleet_of(in_process()) as fleet:
        producer = fleet.producers[0]
        begun, release, order = threading.Event(), threading.Event(), []

        def admit() -> None:
            begun.set()
            release.wait(WAIT_SECONDS)
            order.append("admitted")

        def begin() -> None:
            fleet.begin()
            order.append("begun")

        producer._thread.run_when_quiet(admit)
        assert begun.wait(WAIT_SECONDS)
        beginner = threading.Thread(target=begin)
        beginner.start()
        until(lambda: not producer._thread._quiet)
        release.set()
        beginner.join(WAIT_SECONDS)
        assert order == ["admitted", "begun"]


def test_a_chunk_that_cannot_be_packed_is_named_with_its_consumer() -> None:
    with fleet_of(in_process()) as fleet:
        fleet.begin()
        producer = fleet.producers[0]
        producer.publish(0, {}, WAIT_SECONDS)
        with pytest.raises(SyncAbortedError, match=r"seq 0 \(w\) for consumer r0w0 failed: w: "):
            producer.finish(WAIT_SECONDS)
