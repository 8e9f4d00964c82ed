"""The link to a job: what a worker may not let go of."""

import time
from functools import partial

import pytest

from rdt_plan import ConsumerId, DirectRule, build_plan
from rdt_plan.records import EpochRecord
from rdt_transport import consumer as consumer_module
from rdt_transport.consumer import Consumer
from rdt_transport.errors import SyncAbortedError
from rdt_transport.rendezvous import ConsumerDropped, JobSettings
from rdt_transport.testing.held_reads import HeldReads
from rdt_transport.testing.sample_job import (
    draw,
    expect_shard,
    model,
    open_fleet,
    shards,
    sink_of,
    stable_tensors,
)
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_vllm.link import JobLink

SECONDS = 20.0


def test_it_closes_only_when_no_read_can_land_in_the_model_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, reads = model(), HeldReads("worker")
    writes, sources = shards(manifest, 0, 1), [stable_tensors(manifest, 0)]
    sink = sink_of(writes)
    with open_fleet(reads, manifest, JobSettings(1), (), [], sources=sources) as fleet:
        link = JobLink(
            fleet.host.address,
            lambda: reads("worker"),
            name="worker",
            device="cpu",
            timeout_seconds=SECONDS,
        )
        plan = build_plan(
            manifest,
            writes,
            ConsumerId(0, 0),
            num_workers=1,
            direct=DirectRule.of(manifest, link.job.producers, sink.destinations),
        )
        link.attach(plan, 1, lambda chunk, packed: None, lambda *place: sink.destinations[place])
        link.start(fleet.begin().session, 1)
        fleet.publish(0, weights := draw(manifest, 1))
        assert reads.posted.wait(SECONDS)
        deadline = time.monotonic() + SECONDS  # of the others; what is not posted does not land
        while len(link.consumer._pulling._since) < len(plan.chunks):
            assert time.monotonic() < deadline
            time.sleep(0.001)

        monkeypatch.setattr(consumer_module, "ABORT_TIMEOUT_SECONDS", 0.1)
        assert not link.close()
        assert not link.close()
        with pytest.raises(SyncAbortedError, match="initialise the transfer again"):
            link.start(link.job.session, 2)
        reads.let_go()
        monkeypatch.setattr(consumer_module, "ABORT_TIMEOUT_SECONDS", SECONDS)
        assert link.close()
        assert link.close()
        expect_shard(sink, weights, 0, 1)  # they did land, while it was waited for
        fleet.producers[0].abort(SyncAbortedError("over"))
    sink.close()


def test_a_drop_that_is_told_while_an_epoch_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would announce a chunk to it, so it would wait until its deadline."""
    manifest = model()
    writes = shards(manifest, 0, 1)
    sink, fabric = sink_of(writes), InProcessFabric()
    wire = partial(InProcessWire, fabric)
    with open_fleet(wire, manifest, JobSettings(1), (), []) as fleet:
        link = JobLink(
            fleet.host.address,
            lambda: wire("worker"),
            name="worker",
            device="cpu",
            timeout_seconds=SECONDS,
        )
        plan = build_plan(manifest, writes, ConsumerId(0, 0), num_workers=1)
        link.attach(plan, 1, lambda chunk, packed: None, lambda *place: sink.destinations[place])
        record, start = fleet.begin(), Consumer.start

        def dropped_before(self: Consumer, record: EpochRecord) -> None:
            link._on_event(ConsumerDropped(*record.live[0], "its server is late"))
            start(self, record)

        monkeypatch.setattr(Consumer, "start", dropped_before)
        link.start(record.session, record.epoch, record)
        with pytest.raises(SyncAbortedError, match="its server is late"):
            link.consumer.wait(SECONDS)
        assert link.close()
        fleet.producers[0].abort(SyncAbortedError("over"))
    sink.close()
