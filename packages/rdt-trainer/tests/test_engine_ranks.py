"""Several trainer ranks in one process, a thread each: pipeline stages, and one outcome for all."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rdt_plan import Chunk
from rdt_trainer import (
    ClientError,
    JobSettings,
    RdtTrainer,
    SourceError,
    SourceMeta,
    SyncFailedError,
)
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

NUM_RANKS = 2
NEVER_SECONDS = 120.0
OWNERS = {"embed": None, "layers.0": (0,), "layers.1": (0,), "layers.2": (1,), "layers.3": (1,)}


class Stage:
    """One pipeline stage's view of the model; the tensors all ranks hold are gathered together.

    A gather that not every rank takes part in breaks the barrier after ten seconds.
    """

    def __init__(self, rank: int, weights: dict[str, torch.Tensor], barrier: threading.Barrier):
        self.tamper: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor
        self.passes = 0
        self.barrier = barrier
        self._rank, self._weights = rank, weights

    @property
    def metadata(self) -> list[SourceMeta]:
        return [
            SourceMeta(n, t.dtype, tuple(t.shape), self._owners(n))
            for n, t in self._weights.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            owners = self._owners(name)
            if owners is None:
                self.barrier.wait(10)
            if owners is None or self._rank in owners:
                yield name, self.tamper(name, tensor)
        self.passes += 1

    def _owners(self, name: str) -> tuple[int, ...] | None:
        return OWNERS.get(name.rpartition(".")[0] or name)


class Ranks:
    """Every rank's trainer, called at once as ranks are."""

    def __init__(self, make_wire: Callable[[str], Wire], client: TorchEngineClient) -> None:
        self.client = client
        self.weights = {"embed": torch.randn(8, 6)}
        for layer in range(4):
            self.weights[f"layers.{layer}.w"] = torch.randn(8, 5)
            self.weights[f"layers.{layer}.b"] = torch.randn(7)
        self.weights["norm"] = torch.randn(4)
        barrier = threading.Barrier(NUM_RANKS)
        self.sources = [Stage(rank, self.weights, barrier) for rank in range(NUM_RANKS)]
        settings = JobSettings(num_producers=NUM_RANKS, max_chunk_bytes=64)
        self._host = host_local("ranks", secrets.token_hex(16), settings)
        self._pool = ThreadPoolExecutor(NUM_RANKS)
        self.trainers = [
            RdtTrainer(
                self.sources[rank],
                client if rank == 0 else None,
                rank=rank,
                settings=settings,
                rendezvous=self._host.address,
                make_wire=lambda rank=rank: make_wire(f"producer{rank}"),
                timeout_seconds=NEVER_SECONDS,
            )
            for rank in range(NUM_RANKS)
        ]

    def all(self, call: Callable[[RdtTrainer], object]) -> list[BaseException | None]:
        calls = [self._pool.submit(call, trainer) for trainer in self.trainers]
        return [each.exception() for each in calls]

    def send(self) -> list[BaseException | None]:
        return self.all(lambda trainer: trainer.send_weights())

    def assert_sent(self) -> None:
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape))
        assert self.send() == [None, None]
        for worker, received in enumerate(self.client.workers):
            for name, tensor in self.weights.items():
                assert torch.equal(received[name], self.client.shard(worker, tensor)), name

    def close(self) -> None:
        self.all(lambda trainer: trainer.close())
        self._pool.shutdown()
        self._host.close()


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest) -> Callable[[str], Wire]:
    if request.param == "nixl":
        return NixlWire
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


class Deployment(TorchEngineClient):
    """Its ``refuses`` method fails once, as a server does that answers HTTP 500."""

    refuses = ""

    def update(self, update_info):
        self._refuse("update")
        super().update(update_info)

    def finish(self, weight_version=None):
        self._refuse("finish")
        super().finish(weight_version)

    def _refuse(self, call: str) -> None:
        if self.refuses == call:
            self.refuses = ""
            raise ClientError(f"{call}: HTTP 500: no memory", server_text="no memory")


@pytest.fixture
def before_scatter() -> list[Callable[[int, Chunk], None]]:
    """Whatever is put here is called before each scatter."""
    return []


@pytest.fixture
def ranks(make_wire, before_scatter) -> Iterator[Ranks]:
    def before(worker: int, chunk: Chunk) -> None:
        for each in before_scatter:
            each(worker, chunk)

    ranks = Ranks(make_wire, Deployment(make_wire, num_workers=2, before_scatter=before))
    try:
        assert ranks.all(lambda trainer: trainer.init()) == [None, None]
        yield ranks
    finally:
        ranks.close()


def test_every_stage_serves_what_it_holds(ranks):
    for _ in range(3):
        ranks.assert_sent()


@pytest.mark.parametrize("name", ["embed", "layers.2.w", "norm"])
def test_a_source_that_fails_on_one_rank_fails_the_sync_on_all(ranks, name):
    """Rank 1's stage yields the wrong thing; the barrier shows that both passes went on."""
    ranks.assert_sent()
    ranks.sources[1].tamper = lambda n, t: t.half() if n == name else t
    errors = ranks.send()
    assert isinstance(errors[1], SourceError)
    assert f"rank 1: {name} is float16" in str(errors[1])
    assert isinstance(errors[0], SyncFailedError)
    assert f"trainer rank 1: rank 1: {name} is float16" in str(errors[0])
    assert [source.passes for source in ranks.sources] == [2, 2]
    ranks.sources[1].tamper = lambda n, t: t
    ranks.assert_sent()


@pytest.mark.parametrize("call", ["update", "finish"])
def test_a_server_that_refuses_fails_the_sync_on_all(ranks, call):
    ranks.client.refuses = call
    errors = ranks.send()
    assert [type(error) for error in errors] == [SyncFailedError, SyncFailedError]
    assert isinstance(errors[0].__cause__, ClientError)
    assert str(errors[0]) == str(errors[1])
    assert "no memory" in str(errors[1])
    assert [source.passes for source in ranks.sources] == [1, 1]
    ranks.assert_sent()


def test_a_worker_that_fails_after_everything_was_read_fails_the_sync_on_all(ranks, before_scatter):
    """No rank's tensors are read any more when it fails, and still no rank may report success."""

    def fail_late(worker: int, chunk: Chunk) -> None:
        left.discard((worker, chunk.index))
        if worker == 1 and not left:  # the last: no other waits for the slot that it keeps
            while any(trainer._job.producer.is_busy() for trainer in ranks.trainers):
                time.sleep(0.001)
            before_scatter.clear()
            raise ZeroDivisionError("post-processing failed")

    left = {(1, chunk.index) for chunk in ranks.client._consumers[1].plan.chunks}
    before_scatter.append(fail_late)
    errors = ranks.send()
    assert [type(error) for error in errors] == [SyncFailedError, SyncFailedError]
    for error in errors:
        assert "post-processing failed" in str(error)
    ranks.assert_sent()


def test_a_rank_that_left_is_named(ranks):
    ranks.assert_sent()
    ranks.trainers[1].close()
    ranks.trainers[0]._timeout_seconds = 0.3
    ranks.sources[0].barrier = threading.Barrier(1)
    with pytest.raises(SyncFailedError, match="producer 1"):
        ranks.trainers[0].send_weights()
