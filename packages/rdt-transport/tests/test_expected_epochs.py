"""What producers say of the next epoch before a consumer has begun it."""

import time

import torch

from rdt_plan import Manifest, ParamMeta, Placement, whole
from rdt_transport.pauses import Pauses
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Fleet, Sink
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

MANIFEST = Manifest.build([ParamMeta("w", "float32", (4,))])
WRITES = [Placement(whole(MANIFEST.params[0]), "", "w", 0, (4,), (1,), "float32", (1,))]
WAIT_SECONDS = 20.0


class Asleep(Pauses):
    """Between two jobs there is one poll, and then a pause that never ends."""

    def __init__(self) -> None:
        super().__init__(1000.0, eager=False)

    def polled(self, now: float, *, happened: bool, busy: bool, urgent: bool) -> None:
        self.seconds = 1000.0


def test_it_is_heard_as_soon_as_an_epoch_is_expected() -> None:
    """A quiet wire is polled seldom; here, never."""
    fabric = InProcessFabric()
    sink = Sink({("", "w"): torch.zeros(4)})
    fleet = Fleet(
        lambda role: InProcessWire(fabric, role),
        MANIFEST,
        [WRITES],
        [sink],
        settings=JobSettings(num_producers=1, max_chunk_bytes=64),
    )
    with fleet:
        fleet.sync({"w": torch.randn(4)})
        producer, consumer = fleet.producers[0], fleet.consumers[0]
        progress = consumer._progress
        progress._pauses = Asleep()
        progress.call(lambda wire: None, WAIT_SECONDS)  # what it paused for until now
        weights = {"w": torch.randn(4)}
        record = fleet.clients[0].begin(0, 2, WAIT_SECONDS)
        producer.begin(record)
        fleet.publish(0, weights)
        until(lambda: "DONE" in producer._serving._machine.waiting_for())
        assert not consumer._mailbox._kept

        consumer.expect()
        until(lambda: bool(consumer._mailbox._kept))

        progress._pauses = Pauses(0.01, eager=False)
        consumer.start(record)
        producer.finish(WAIT_SECONDS)
        consumer.wait(WAIT_SECONDS)
        consumer.commit(WAIT_SECONDS)
    sink.close()
    assert torch.equal(sink.destinations["", "w"], weights["w"])


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
