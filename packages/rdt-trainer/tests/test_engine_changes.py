"""Replicas that come and go between syncs: rank 0 says so, and no other rank is asked."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch

from rdt_plan import Chunk
from rdt_trainer import (
    ClientError,
    JobSettings,
    RdtTrainer,
    SettingsError,
    SourceMeta,
    SyncReport,
    TrainerStateError,
)
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

NEVER_SECONDS = 300.0  # of waits that must end before; a test that needs them has failed
NUM_SLOTS = 2
MakeWire = Callable[[str], Wire]


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest) -> MakeWire:
    if request.param == "nixl":
        return NixlWire
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


class Source:
    """All ranks hold all of it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Fleet:
    """Two trainer ranks, a thread each, before servers that come and go."""

    def __init__(self, *servers: TorchEngineClient, make_wire: MakeWire, lookahead=1, num_layers=6):
        self.servers = dict(enumerate(servers))
        self.tensors = {f"layers.{each}.w": torch.zeros(8, 5) for each in range(num_layers)}
        settings = JobSettings(2, len(servers), num_slots=NUM_SLOTS, lookahead=lookahead)
        self._cleanup = ExitStack()
        host = self._cleanup.enter_context(closing(host_local("changes", "token", settings)))
        self.ranks = ThreadPoolExecutor(2)
        self.trainers = [
            RdtTrainer(
                Source(self.tensors),
                servers if rank == 0 else None,
                rank=rank,
                settings=settings,
                rendezvous=host.address,
                make_wire=lambda rank=rank: make_wire(f"producer{rank}"),
                timeout_seconds=NEVER_SECONDS,
            )
            for rank in range(2)
        ]
        for trainer in self.trainers:
            self._cleanup.callback(trainer.close)
        list(self.ranks.map(RdtTrainer.init, self.trainers))

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cleanup.close()
        self.ranks.shutdown()

    def add(self, server: TorchEngineClient) -> int:
        replica = self.trainers[0].add_replica(server)
        self.servers[replica] = server
        return replica

    def send(self, *committed: int, dropped: tuple[int, ...] = ()) -> list[SyncReport]:
        """A sync that exactly these replicas complete; both ranks say so, and they are exact."""
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        reports = list(self.ranks.map(RdtTrainer.send_weights, self.trainers))
        for report in reports:
            assert report.committed == committed
            assert tuple(report.dropped) == dropped
        for replica in committed:
            self.check(self.servers[replica])
        return reports

    def check(self, server: TorchEngineClient) -> None:
        for worker, received in enumerate(server.workers):
            for name, tensor in self.tensors.items():
                assert torch.equal(received[name], server.shard(worker, tensor)), name


def test_a_third_replica_joins_and_one_leaves_between_syncs(make_wire):
    """Of one worker, of two, and of three, which divide nothing: each whole on its own."""
    first, second = TorchEngineClient(make_wire), TorchEngineClient(make_wire, num_workers=2)
    with Fleet(first, second, make_wire=make_wire) as fleet:
        trainer = fleet.trainers[0]
        for _ in range(2):
            fleet.send(0, 1)
        third = TorchEngineClient(make_wire, num_workers=3)
        assert fleet.add(third) == 2
        assert third.calls == ["init"]  # attached now, not when weights are sent
        fleet.send(0, 1, 2)
        trainer.remove_replica(0)
        assert first.calls[-1] == "shutdown"
        kept = {name: tensor.clone() for name, tensor in first.workers[0].items()}
        fleet.send(1, 2)
        assert all(torch.equal(first.workers[0][name], kept[name]) for name in kept)
        assert trainer.replicas == (1, 2)
        assert fleet.add(first) == 3  # numbers are given once
        fleet.send(1, 2, 3)
        assert third.calls == ["init", *["start", "update", "finish"] * 3]


def test_a_server_that_restarted_comes_back_at_another_size_without_a_call(make_wire):
    first, second = TorchEngineClient(make_wire), TorchEngineClient(make_wire, num_workers=2)
    with Fleet(first, second, make_wire=make_wire) as fleet:
        replica = fleet.add(TorchEngineClient(make_wire, num_workers=3))
        fleet.send(0, 1, replica)
        fleet.servers[replica].kill()
        fleet.servers[replica]._num_workers = 1
        fleet.send(0, 1, replica)


class Refusing(TorchEngineClient):
    """Its ``init`` fails, before any worker is attached or after all are."""

    attaches = False

    def init(self, init_info):
        if self.attaches:
            super().init(init_info)
        raise ClientError("init: HTTP 500: no memory", server_text="no memory")


@pytest.mark.parametrize("attaches", [False, True])
def test_a_replica_that_cannot_join_changes_nothing(make_wire, attaches):
    with Fleet(TorchEngineClient(make_wire), make_wire=make_wire) as fleet:
        fleet.send(0)
        newcomer = Refusing(make_wire)
        newcomer.attaches = attaches
        with pytest.raises(ClientError, match="no memory"):
            fleet.trainers[0].add_replica(newcomer)
        assert "shutdown" not in newcomer.calls, "it may be another trainer's"
        fleet.send(0)
        assert fleet.trainers[0].replicas == (0,)
        names = {thread.name for thread in threading.enumerate()}
        assert "rdt-control-0" in names and "rdt-control-1" not in names
        assert fleet.add(TorchEngineClient(make_wire)) == 2
        fleet.send(0, 2)


def test_a_replica_that_is_dead_can_be_removed_and_is_named_until_then(make_wire, caplog):
    with Fleet(*(TorchEngineClient(make_wire) for _ in range(2)), make_wire=make_wire) as fleet:
        fleet.send(0, 1)
        dead = fleet.servers[1]
        dead.kill()

        def refuse(*arguments: object) -> None:
            raise ClientError("connection refused", server_text="connection refused")

        dead.init = dead.shutdown = refuse
        fleet.send(0, dropped=(1,))
        fleet.trainers[0].remove_replica(1)
        assert "replica 1 could not be attached again: connection refused" in caplog.text
        fleet.send(0)


def test_what_cannot_be_changed_is_refused(make_wire):
    server = TorchEngineClient(make_wire)
    unopened = RdtTrainer(Source({}), server)
    with pytest.raises(TrainerStateError, match=r"no replica can be added: expected rank 0, after"):
        unopened.add_replica(server)
    assert unopened.replicas == ()
    with Fleet(server, make_wire=make_wire) as fleet:
        trainer, other = fleet.trainers
        assert other.replicas == ()
        with pytest.raises(TrainerStateError, match="no replica can be added: expected rank 0"):
            other.add_replica(server)
        with pytest.raises(TrainerStateError, match=r"replica 1 cannot be removed.* \[0\]"):
            trainer.remove_replica(1)
        with pytest.raises(TrainerStateError, match="replica 0 is the only one"):
            trainer.remove_replica(0)
        with pytest.raises(SettingsError, match="torch engine is a replica already"):
            trainer.add_replica(server)
        server.num_workers = -1
        with pytest.raises(SettingsError, match="num_workers is -1"):
            trainer.add_replica(server)
        fleet.send(0)
    with pytest.raises(TrainerStateError, match="closed"):
        trainer.add_replica(server)


def test_a_slow_twin_holds_the_other_back_by_its_slots_and_no_more(make_wire):
    """Two replicas of one plan: every chunk is packed once, and read by each in its time.

    The slow one scatters nothing until the fast one has all that slots can hold: as much as the
    slow one keeps in its own, and what waits for it in those of both ranks. It then finds in its
    slots what belongs there.
    """
    quick, slow, ahead = threading.Semaphore(0), threading.Event(), 3 * NUM_SLOTS

    def at_once(worker: int, chunk: Chunk) -> None:
        quick.release()

    def in_its_time(worker: int, chunk: Chunk) -> None:
        if not slow.is_set():
            assert all(quick.acquire(timeout=60) for _ in range(ahead))
            slow.set()

    twins = [
        TorchEngineClient(make_wire, before_scatter=before, direct=False)
        for before in (at_once, in_its_time)
    ]
    with Fleet(*twins, make_wire=make_wire, lookahead=12, num_layers=12) as fleet:
        fleet.send(0, 1)
        assert slow.is_set()
