"""Doorbells of the epoch before, arriving while the next one opens: they must change nothing."""

import threading
from collections.abc import Callable

import pytest
import torch

from rdt_plan import Doorbell, Kind, Manifest, ParamMeta, Placement, whole
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Fleet, Sink
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

SHAPE = (4, 4)
NAMES = [f"layers.{i}.w" for i in range(3)]
MANIFEST = Manifest.build([ParamMeta(name, "float32", SHAPE) for name in NAMES])
WRITES = [
    Placement(whole(param), "", param.name, 0, SHAPE, (4, 1), "float32", (4, 1))
    for param in MANIFEST.params
]


def while_opening(endpoint, begin: Callable[[], None], peer: str, doorbell: Doorbell) -> None:
    """Ring ``doorbell`` after ``begin`` returned, before the progress thread hears of the epoch."""
    began, rung, errors = threading.Event(), threading.Event(), []

    def ring(wire: Wire) -> None:
        began.wait(10)
        try:
            endpoint.on_doorbell(wire, peer, doorbell)
        except Exception as error:
            errors.append(error)
        rung.set()

    endpoint._progress.submit(ring)
    begin()
    began.set()
    assert rung.wait(10)
    assert errors == []


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.READY])
def test_late_doorbells_do_not_reach_the_next_epoch(kind):
    fabric = InProcessFabric()
    sink = Sink({("", name): torch.zeros(SHAPE) for name in NAMES})
    fleet = Fleet(
        lambda role: InProcessWire(fabric, role),
        MANIFEST,
        [WRITES],
        [sink],
        settings=JobSettings(num_producers=1, max_chunk_bytes=64),
    )
    with fleet:
        fleet.sync({name: torch.randn(SHAPE) for name in NAMES})
        producer, consumer = fleet.producers[0], fleet.consumers[0]
        record = fleet.clients[0].begin(0, 2, 10)
        sender, receiver = consumer.incarnation, producer.incarnation
        ours, theirs = producer._progress.wire_name, consumer._progress.wire_name
        if kind is Kind.READY:
            sender, receiver = receiver, sender
        stale = Doorbell(bytes.fromhex(record.session), 1, sender, receiver, kind, 0)
        if kind is Kind.DONE:
            while_opening(producer, lambda: producer.begin(record), theirs, stale)
            consumer.start(record)
        else:
            while_opening(consumer, lambda: consumer.start(record), ours, stale)
            producer.begin(record)
        weights = {name: torch.randn(SHAPE) for name in NAMES}
        fleet.publish(0, weights)
        producer.finish(10)
        consumer.wait(10)
        consumer.commit(10)
    sink.close()
    for name, tensor in weights.items():
        assert torch.equal(sink.destinations["", name], tensor)
