"""Scatters that a device runs late: enqueued is not done, and a slot is not free before it is."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rdt_plan import Chunk
from rdt_transport.events import Event, HostEvents
from rdt_transport.pulling import Pulling
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Destinations, Fleet, Sink
from rdt_transport.testing.sample_job import draw, expect_exact, model, shards
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

SECONDS = 20.0


class Mark:
    """An event; the device completes it when it comes to it."""

    def __init__(self) -> None:
        self.completed = threading.Event()

    def query(self) -> bool:
        return self.completed.is_set()


class SlowDevice:
    """One stream of a device that does what is enqueued in order, each thing after its delay.

    Args:
        delays: seconds before each thing, again and again.
    """

    def __init__(self, delays: list[float]) -> None:
        self._delays = delays
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slow-device", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> Event:
        mark = Mark()
        self.enqueue(mark.completed.set)
        return mark

    def wait(self, event: Event) -> None:
        raise AssertionError("nothing here waits for another stream")

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def bind(self) -> None:
        return None

    def close(self) -> None:
        """Once all that is enqueued is done."""
        self._work.put(None)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while (work := self._work.get()) is not None:
            time.sleep(self._delays[number % len(self._delays)])
            work()
            number += 1


class SlowSink(Sink):
    """Enqueues its copies on a device and goes on."""

    def __init__(self, destinations: Destinations, device: SlowDevice) -> None:
        self._device = device
        super().__init__(destinations, None, device)

    def _scatter(self, chunk: Chunk, packed: torch.Tensor) -> None:
        copies = super()._scatter
        self._device.enqueue(lambda: copies(chunk, packed))


@contextmanager
def slow_fleet(num_slots: int, max_chunk_bytes: int, delays: list[float]) -> Iterator[Fleet]:
    manifest, fabric, device = model(), InProcessFabric(), SlowDevice(delays)
    writes = shards(manifest, 0, 1)
    zeros = {
        (w.module, w.param): torch.zeros(w.shape, dtype=getattr(torch, w.dtype)) for w in writes
    }
    sink = SlowSink(zeros, device)
    job = JobSettings(1, num_slots=num_slots, max_chunk_bytes=max_chunk_bytes)
    make_wire = lambda role: InProcessWire(fabric, role)  # noqa: E731
    try:
        with Fleet(make_wire, manifest, [writes], [sink], settings=job) as fleet:
            yield fleet
            device.close()
    finally:
        sink.close()


@given(
    num_slots=st.integers(1, 3),
    max_chunk_bytes=st.sampled_from([32, 64, 200]),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.003]), min_size=1, max_size=5),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_slot_is_kept_until_its_scatter_is_done(
    num_slots: int, max_chunk_bytes: int, delays: list[float]
) -> None:
    with slow_fleet(num_slots, max_chunk_bytes, delays) as fleet:
        for seed in (1, 2):
            weights = draw(fleet.manifest, seed)
            fleet.sync(weights)
            expect_exact(fleet, weights)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_without_the_wait_for_its_event_it_is_overwritten(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scattered = Pulling.scattered

    def at_once(self: Pulling, wire: Wire, index: int, event: Event) -> None:
        scattered(self, wire, index, HostEvents().record())

    monkeypatch.setattr(Pulling, "scattered", at_once)
    with slow_fleet(num_slots, 32, [0.02]) as fleet:
        weights = draw(fleet.manifest, 1)
        fleet.sync(weights)
        fleet.sinks[0]._device.close()
        with pytest.raises(AssertionError, match="the bytes differ"):
            expect_exact(fleet, weights)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_whole_epoch_is_not_over_before_the_last_scatter_is_done(num_slots: int) -> None:
    with slow_fleet(num_slots, 1000, [0.02]) as fleet:
        weights = draw(fleet.manifest, 1)
        fleet.sync(weights)
        expect_exact(fleet, weights)
