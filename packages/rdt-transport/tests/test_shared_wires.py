"""Two sessions on one progress thread, and consumers whose attachment or epoch went wrong."""

import secrets
import threading
from contextlib import AbstractContextManager, ExitStack

import pytest

from rdt_plan import ConsumerId, Manifest, ParamMeta, build_plan
from rdt_transport import consumer as consumer_module
from rdt_transport.consumer import Consumer
from rdt_transport.errors import SyncTimeoutError, WireError
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import JobSettings, RendezvousClient
from rdt_transport.testing.fleet import Fleet
from rdt_transport.testing.sample_job import draw, expect_exact, open_fleet, shards
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.base import ReadDone
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

WAIT_SECONDS = 20.0

MANIFEST = Manifest.build([ParamMeta("w", "float32", (4, 4))])


def fleet_of(make_wire: MakeWire) -> AbstractContextManager[Fleet]:
    return open_fleet(make_wire, MANIFEST, JobSettings(num_producers=1, num_replicas=2), [1])


def sync(fleet: Fleet) -> None:
    weights = draw(MANIFEST, secrets.randbits(32))
    fleet.sync(weights)
    expect_exact(fleet, weights)


def second(fleet: Fleet, progress: ProgressThread, client: RendezvousClient) -> Consumer:
    plan = build_plan(MANIFEST, shards(MANIFEST, 0, 1), ConsumerId(1, 0), num_workers=1)
    return Consumer(progress, client, plan=plan, num_workers=1, on_chunk=lambda *_: None)


def test_a_consumer_that_leaves_does_not_cut_off_another_on_its_wire(make_wire: MakeWire) -> None:
    with fleet_of(make_wire) as fleet, RendezvousClient(fleet.host.address) as client:
        other = second(fleet, fleet.consumers[0]._progress, client)
        other.attach(WAIT_SECONDS)
        rings = fleet.producers[0]._rings
        assert len(rings._served) == 2
        other.close()
        client.leave()
        gone = threading.Event()
        while len(rings._served) == 2:
            assert not gone.wait(0.001)
        for _ in range(2):
            sync(fleet)


def test_a_consumer_whose_attachment_failed_closes_and_leaves_the_thread(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise WireError("no way there")

    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of(make_wire))
        client = stack.enter_context(RendezvousClient(fleet.host.address))
        progress = ProgressThread(lambda: make_wire("second"), name="second")
        stack.callback(progress.close)
        other = second(fleet, progress, client)
        monkeypatch.setattr(progress.peers, "meet", fail)
        with pytest.raises(WireError, match="no way there"):
            other.attach(WAIT_SECONDS)
        other.close()
        assert not progress._endpoints
        other.close()


class Stuck(InProcessWire):
    """Its first read never ends."""

    def poll(self) -> list:
        return [event for event in super().poll() if not isinstance(event, ReadDone)]


def test_a_wait_for_an_epoch_that_failed_ends_by_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although a read does not drain, and although the wait has long to go."""
    monkeypatch.setattr(consumer_module, "ABORT_TIMEOUT_SECONDS", 0.1)
    fabric = InProcessFabric()
    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of(lambda role: Stuck(fabric, role)))
        consumer = fleet.consumers[0]
        fleet.begin()
        fleet.publish(0, draw(MANIFEST, 1))
        fleet.producers[0].finish(WAIT_SECONDS)  # it has been read, but nobody says so
        error = ValueError("the engine broke")
        consumer.fail(error)
        with pytest.raises(SyncTimeoutError, match=r"still in flight .*the engine broke") as caught:
            consumer.wait(3600.0)
        assert caught.value.__cause__ is error
        monkeypatch.setattr(Stuck, "poll", InProcessWire.poll)
        consumer._pulling.settled.set()  # or closing would wait for the read again
