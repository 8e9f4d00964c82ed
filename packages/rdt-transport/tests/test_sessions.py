"""Producers and consumers with real sessions, a real rendezvous and both wires: bytes compared."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdt_plan import Manifest
from rdt_transport.errors import (
    RendezvousLostError,
    SyncAbortedError,
    SyncTimeoutError,
    TornError,
)
from rdt_transport.rendezvous import (
    ConnectionLost,
    ConsumerDropped,
    ConsumerLeft,
    EpochFailed,
    JobSettings,
)
from rdt_transport.testing.fleet import Fleet
from rdt_transport.testing.sample_job import draw, expect_exact, in_process, model, open_fleet
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

NUM_WORKERS = 2


@contextmanager
def fleet_of(make_wire: MakeWire, manifest: Manifest, job: JobSettings) -> Iterator[Fleet]:
    before = threading.active_count()
    with open_fleet(make_wire, manifest, job, [NUM_WORKERS]) as fleet:
        yield fleet
    assert threading.active_count() <= before


def test_several_epochs_are_exact_each(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1, max_chunk_bytes=64)) as fleet:
        for seed in (1, 2, 3):
            weights = draw(manifest, seed)
            fleet.sync(weights)
            expect_exact(fleet, weights)
            stats = fleet.consumers[0].wait(1.0)
            assert (stats.epoch, stats.bytes_pulled) == (seed, fleet.consumers[0].plan.bytes_pulled)


def test_what_is_told_after_the_end_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    manifest = model()
    with fleet_of(in_process(), manifest, JobSettings(1, max_chunk_bytes=64)) as fleet:
        fleet.sync(draw(manifest, 1))
    consumer, (producer,) = fleet.consumers[0], fleet.producers
    gone = consumer.plan.consumer, consumer.incarnation.hex()
    for event in (
        EpochFailed(1, "late"),
        ConsumerDropped(*gone, "late"),
        ConsumerLeft(*gone),
        ConnectionLost("it was closed"),
    ):
        producer.on_event(event)
        consumer.on_event(event)
    assert caplog.text == ""


class LatestFirst(InProcessWire):
    """Of the reads that end at the same poll, the latest is told first."""

    def poll(self) -> list:
        return super().poll()[::-1]


def test_reads_that_end_in_another_order_are_scattered_in_plan_order() -> None:
    fabric = InProcessFabric(read_polls=40)
    manifest, job = model(), JobSettings(1, num_slots=3, max_chunk_bytes=32)
    with fleet_of(lambda role: LatestFirst(fabric, role), manifest, job) as fleet:
        seen: list[int] = []
        fleet.sinks[0].before = lambda chunk: seen.append(chunk.index)
        weights = draw(manifest, 1)
        fleet.sync(weights)
        expect_exact(fleet, weights)
        assert seen == list(range(len(fleet.consumers[0].plan.chunks)))


def test_two_pipeline_stages(make_wire: MakeWire) -> None:
    manifest = model(num_layers=4, owners=((0,), (1,)))
    with fleet_of(make_wire, manifest, JobSettings(2, max_chunk_bytes=96)) as fleet:
        assert set(fleet.consumers[0].plan.owners) == {0, 1}
        for seed in (1, 2):
            weights = draw(manifest, seed)
            fleet.sync(weights)
            expect_exact(fleet, weights)


@given(
    num_layers=st.integers(1, 4),
    rows=st.sampled_from([2, 4, 10]),
    num_slots=st.integers(1, 3),
    max_chunk_bytes=st.sampled_from([16, 48, 1000]),
    lookahead=st.integers(0, 2),
    replicated=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_shape_of_job_is_exact(
    num_layers: int,
    rows: int,
    num_slots: int,
    max_chunk_bytes: int,
    lookahead: int,
    replicated: bool,
) -> None:
    fabric = InProcessFabric()
    owners = ((0, 1),) if replicated else ((0,), (1,))
    manifest = model(num_layers, rows, owners)
    job = JobSettings(2, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes, lookahead=lookahead)
    with fleet_of(lambda role: InProcessWire(fabric, role), manifest, job) as fleet:
        for seed in (1, 2):
            weights = draw(manifest, seed)
            fleet.sync(weights)
            expect_exact(fleet, weights)


def test_a_failed_install_aborts_and_the_next_epoch_heals(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1, max_chunk_bytes=64)) as fleet:

        def refuse(chunk: object) -> None:
            raise ValueError("no room")

        fleet.sinks[0].before = refuse
        fleet.begin()
        publisher = threading.Thread(target=publish_quietly, args=(fleet, draw(manifest, 1)))
        publisher.start()
        with pytest.raises(ValueError, match="no room"):
            fleet.consumers[0].wait(10.0)
        fleet.clients[1].fail(1, "worker r0w0: no room")
        publisher.join()
        with pytest.raises(SyncAbortedError, match="epoch 1 failed: worker r0w0: no room"):
            fleet.producers[0].finish(10.0)
        with pytest.raises(SyncAbortedError, match="no room"):
            fleet.consumers[1].wait(10.0)
        fleet.producers[0].abort(SyncAbortedError("over"))
        fleet.sinks[0].before = None
        weights = draw(manifest, 2)
        fleet.sync(weights)
        expect_exact(fleet, weights)


def publish_quietly(fleet: Fleet, weights: dict[str, torch.Tensor]) -> None:
    try:
        fleet.publish(0, weights)
    except SyncAbortedError:
        pass


WAITED = (
    r"r0w0, epoch 1: waited 0\.1 s for chunk 0 \(seq 0, embed\) of producer 0: READY not received; "
    "raise timeout_seconds if the peer is only slow; otherwise look at its log$"
)


def test_a_wait_that_ends_names_what_it_waited_for(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1)) as fleet:
        fleet.begin()
        with pytest.raises(SyncTimeoutError, match=WAITED):
            fleet.consumers[0].wait(0.1)
        with pytest.raises(SyncTimeoutError, match="group 0 to be published; raise timeout_sec"):
            fleet.producers[0].finish(0.1)


def test_a_source_that_is_not_as_declared_is_refused(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1)) as fleet:
        fleet.begin()
        wrong = {"embed": torch.zeros(3, 3)}
        with pytest.raises(Exception, match=r"embed: the manifest says bfloat16\[8, 6\]"):
            fleet.producers[0].publish(0, wrong, 1.0)


def test_the_comparison_fails_on_one_flipped_byte(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1)) as fleet:
        weights = draw(manifest, 1)
        fleet.sync(weights)
        fleet.sinks[1].destinations["layers.1", "w"].view(torch.uint8).view(-1)[5] ^= 1
        with pytest.raises(AssertionError):
            expect_exact(fleet, weights)


def test_a_consumer_that_comes_back_takes_part_in_the_next_epoch(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1, max_chunk_bytes=64)) as fleet:
        fleet.sync(draw(manifest, 1))
        for worker in range(NUM_WORKERS):
            fleet.consumers[worker].close()
            fleet.clients[1 + worker].leave()
        for worker in range(NUM_WORKERS):
            fleet.attach(worker)
        weights = draw(manifest, 2)
        fleet.sync(weights)
        expect_exact(fleet, weights)


def test_a_second_epoch_cannot_begin_while_one_is_open(make_wire: MakeWire) -> None:
    with fleet_of(make_wire, model(), JobSettings(1)) as fleet:
        record = fleet.begin()
        with pytest.raises(SyncAbortedError, match="epoch 1 is still open"):
            fleet.consumers[0].start(record)
        with pytest.raises(SyncAbortedError, match="epoch 1 is still open"):
            fleet.producers[0].begin(record)


def test_a_failure_told_before_the_epoch_starts_is_heeded(make_wire: MakeWire) -> None:
    with fleet_of(make_wire, model(), JobSettings(1)) as fleet:
        record = fleet.clients[0].begin(0, 1, 10.0)
        fleet.clients[1].fail(1, "changed our minds")
        for party in (fleet.producers[0], fleet.consumers[0]):
            party.on_event(EpochFailed(1, "changed our minds"))  # the push, in this order for sure
        fleet.producers[0].begin(record)
        fleet.consumers[0].start(record)
        with pytest.raises(SyncAbortedError, match="changed our minds"):
            fleet.consumers[0].wait(10.0)
        with pytest.raises(SyncAbortedError, match="changed our minds"):
            fleet.producers[0].finish(10.0)


def test_a_consumer_dropped_before_the_producer_begins_takes_no_part(make_wire: MakeWire) -> None:
    manifest = model()
    with fleet_of(make_wire, manifest, JobSettings(1)) as fleet:
        record = fleet.clients[0].begin(0, 1, 10.0)
        producer = fleet.producers[0]
        for consumer in fleet.consumers:
            incarnation = consumer.incarnation.hex()
            producer.on_event(ConsumerDropped(consumer.plan.consumer, incarnation, "silent"))
        producer.begin(record)
        fleet.publish(0, draw(manifest, 1))
        producer.finish(10.0)  # nobody is waited for


def test_losing_the_rendezvous_ends_the_epoch_by_name(make_wire: MakeWire) -> None:
    with fleet_of(make_wire, model(), JobSettings(1)) as fleet:
        fleet.begin()
        fleet.host.close()
        with pytest.raises(RendezvousLostError, match="the rendezvous is gone"):
            fleet.consumers[0].wait(10.0)
        with pytest.raises(RendezvousLostError, match="the rendezvous is gone"):
            fleet.producers[0].finish(10.0)


def test_a_dropped_consumer_ends_its_own_epoch(make_wire: MakeWire) -> None:
    with fleet_of(make_wire, model(), JobSettings(1)) as fleet:
        fleet.begin()
        consumer = fleet.consumers[1]
        fleet.clients[0].drop(consumer.plan.consumer, consumer.incarnation.hex(), "too slow")
        for fallen in fleet.consumers:  # the whole replica
            with pytest.raises(TornError, match=r"was dropped: .*too slow"):
                fallen.wait(10.0)


def test_what_is_told_after_the_close_is_ignored() -> None:
    with fleet_of(in_process(), model(), JobSettings(1)) as fleet:
        fleet.sync(draw(fleet.manifest, 1))
    consumer = fleet.consumers[0]
    consumer.on_event(ConsumerDropped(consumer.plan.consumer, consumer.incarnation.hex(), ""))
