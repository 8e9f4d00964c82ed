"""Sessions on a GPU, between two processes: what is enqueued is not done, and must be waited for.

Work that is slow stands before the copies that matter, so that whoever does not wait for it meets
the bytes of before; each such test has a mutant that does not wait, and fails.
"""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from rdt_plan import Chunk
from rdt_transport.consumer import Consumer
from rdt_transport.events import Event, HostEvents
from rdt_transport.pulling import Pulling
from rdt_transport.rendezvous import JobSettings, RendezvousClient
from rdt_transport.testing.fleet import Sink
from rdt_transport.testing.sample_job import draw, expect_shard, model, shards, sink_of
from rdt_transport.testing.trainer_process import TrainerProcess, worker_of
from rdt_transport.wire.base import Wire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SECONDS = 60.0
SLOW_SCATTER_CYCLES = 40_000_000  # some twenty milliseconds
SLOW_FORWARD_CYCLES = 4_000_000_000  # some two seconds: a whole sync takes less
SLOW_GATHER_ROUNDS = 60
MANIFEST = model(num_layers=4, rows=1 << 16)
MIXED = ("embed", "layers.1.w", "layers.2.norm", "head")


def settings_of(num_slots: int = 2) -> JobSettings:
    return JobSettings(1, num_slots=num_slots, max_chunk_bytes=1 << 20)


class Pair:
    """A trainer in a process of its own, and a worker here."""

    def __init__(
        self, trainer: TrainerProcess, consumer: Consumer, client: RendezvousClient, sink: Sink
    ) -> None:
        self.trainer = trainer
        self.consumer = consumer
        self.sink = sink
        self._client = client

    def sync(self, epoch: int, gather_rounds: int = 0) -> None:
        """One epoch of the weights of seed ``epoch``."""
        self.trainer.tell("sync", epoch, epoch, gather_rounds)
        self.consumer.start(self._client.epoch_record(SECONDS, epoch))
        self.consumer.wait(SECONDS)
        self.consumer.commit(SECONDS)
        self.trainer.answer()
        torch.cuda.synchronize()

    def expect(self, epoch: int) -> None:
        expect_shard(self.sink, draw(MANIFEST, epoch), 0, 1)


@contextmanager
def pair_of(
    stable: tuple[str, ...] | None, num_slots: int = 2, scatter_cycles: int = 0
) -> Generator[Pair]:
    def before(chunk: Chunk) -> None:
        if scatter_cycles:
            torch.cuda._sleep(scatter_cycles)

    settings = settings_of(num_slots)
    sink = sink_of(shards(MANIFEST, 0, 1), "cuda", before)
    try:
        with (
            TrainerProcess(MANIFEST, settings, "cuda", stable) as trainer,
            worker_of(trainer, MANIFEST, settings, sink, "cuda") as (consumer, client),
        ):
            yield Pair(trainer, consumer, client, sink)
    finally:
        sink.close()


@pytest.mark.parametrize("stable", [None, (), MIXED], ids=["direct", "slotted", "mixed"])
def test_every_epoch_is_exact_although_the_trainer_goes_on_at_once(
    stable: tuple[str, ...] | None,
) -> None:
    with pair_of(stable) as pair:
        plan = pair.consumer.plan
        assert (plan.direct_bytes > 0) == (stable != ())
        assert (plan.staged_bytes > 0) == (stable is not None)
        for epoch in (1, 2, 3):
            pair.sync(epoch)
            pair.expect(epoch)
            stats = pair.consumer.wait(1.0)
            assert (stats.bytes_direct, stats.bytes_staged) == (
                plan.direct_bytes,
                plan.staged_bytes,
            )


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_slow_scatter_keeps_its_slot(num_slots: int) -> None:
    with pair_of((), num_slots, SLOW_SCATTER_CYCLES) as pair:
        assert len(pair.consumer.plan.chunks) > 2 * num_slots
        for epoch in (1, 2):
            pair.sync(epoch)
            pair.expect(epoch)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_without_the_wait_for_its_event_it_would_lose_it(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scattered = Pulling.scattered

    def at_once(self: Pulling, wire: Wire, index: int, event: Event) -> None:
        scattered(self, wire, index, HostEvents().record())

    monkeypatch.setattr(Pulling, "scattered", at_once)
    with pair_of((), num_slots, SLOW_SCATTER_CYCLES) as pair:
        pair.sync(1)
        with pytest.raises(AssertionError, match="the bytes differ"):
            pair.expect(1)


@pytest.mark.parametrize("stable", [None, (), MIXED], ids=["direct", "slotted", "mixed"])
def test_a_slow_gather_is_waited_for(stable: tuple[str, ...] | None) -> None:
    with pair_of(stable) as pair:
        for epoch in (1, 2):
            pair.sync(epoch, SLOW_GATHER_ROUNDS)
            pair.expect(epoch)


@pytest.mark.parametrize("stable", [None, ()], ids=["direct", "slotted"])
def test_without_the_wait_for_the_publisher_old_weights_would_arrive(
    stable: tuple[str, ...] | None,
) -> None:
    with pair_of(stable) as pair:
        pair.sync(1)
        pair.expect(1)
        pair.trainer.ask("hurry")
        pair.sync(2, SLOW_GATHER_ROUNDS)
        with pytest.raises(AssertionError, match="the bytes differ"):
            pair.expect(2)


def old_weights_seen_by_the_last_forward(pair: Pair) -> bool:
    """Whether work that was enqueued before a sync reads the weights of before."""
    pair.sync(1)
    destinations = pair.sink.destinations
    seen = {place: torch.zeros_like(tensor) for place, tensor in destinations.items()}
    before = {place: tensor.clone() for place, tensor in destinations.items()}
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW_FORWARD_CYCLES)
    for place, tensor in destinations.items():
        seen[place].copy_(tensor)
    pair.sync(2)
    pair.expect(2)
    return all(
        torch.equal(seen[place].view(torch.uint8), before[place].view(torch.uint8))
        for place in destinations
    )


@pytest.mark.parametrize("stable", [None, (), MIXED], ids=["direct", "slotted", "mixed"])
def test_the_last_forward_reads_the_weights_of_before(stable: tuple[str, ...] | None) -> None:
    with pair_of(stable) as pair:
        assert old_weights_seen_by_the_last_forward(pair)


def test_without_the_wait_for_it_it_would_read_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair_of(None) as pair:
        monkeypatch.setattr(pair.consumer._events, "record", HostEvents().record)
        assert not old_weights_seen_by_the_last_forward(pair)
