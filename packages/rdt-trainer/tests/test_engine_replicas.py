"""Several replicas: one that fails, dies or hangs is named, the others finish, it comes back."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch

from rdt_plan import EpochRecord
from rdt_trainer import ClientError, JobSettings, RdtTrainer, SourceMeta, SyncFailedError
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.errors import SyncAbortedError
from rdt_transport.rendezvous import ConsumerDropped, RendezvousClient, host_local
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

NEVER_SECONDS = 300.0  # of waits that must end before; a test that needs them has failed
MakeWire = Callable[[str], Wire]
CALLS = ["start", "update", "finish"]


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest) -> MakeWire:
    if request.param == "nixl":
        return NixlWire
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Whatever waits for it goes on when the test ends."""
    event = threading.Event()
    yield event
    event.set()


class Source:
    """Six layers, more than are resident at once; ``meanwhile`` is called with each name."""

    def __init__(self) -> None:
        self.tensors = {f"layers.{each}.w": torch.randn(8, 5) for each in range(6)}
        self.meanwhile: Callable[[str], None] = lambda name: None

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            self.meanwhile(name)
            yield name, tensor

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))


class Server(TorchEngineClient):
    """``troubles`` are called by the name of a call, before it, and may raise or wait."""

    def __init__(self, make_wire: MakeWire, num_workers: int = 1, **options) -> None:
        super().__init__(make_wire, num_workers=num_workers, **options)
        self.troubles: dict[str, Callable[[], None]] = {}

    def init(self, init_info):
        self.troubles.get("init", lambda: None)()
        super().init(init_info)

    def start(self):
        self.troubles.get("start", lambda: None)()
        super().start()

    def update(self, update_info):
        self.troubles.get("update", lambda: None)()
        super().update(update_info)

    def finish(self, weight_version=None):
        self.troubles.get("finish", lambda: None)()
        super().finish(weight_version)
        self.troubles.get("answer", lambda: None)()


def refusing(call: str) -> Callable[[], None]:
    def refuse() -> None:
        raise ClientError(f"{call}: HTTP 500: no memory", server_text="no memory", status=500)

    return refuse


class Fleet:
    """A trainer before a replica of one worker and one of two, all exact in the end."""

    def __init__(self, make_wire: MakeWire, timeout_seconds: float, **options) -> None:
        self.source = Source()
        self.servers = [Server(make_wire), Server(make_wire, 2, **options)]
        self.trainer = RdtTrainer(
            self.source,
            self.servers,
            make_wire=lambda: make_wire("producer"),
            timeout_seconds=timeout_seconds,
        )
        self.trainer.init()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.trainer.close()

    def assert_exact(self, replica: int) -> None:
        server = self.servers[replica]
        for worker, received in enumerate(server.workers):
            for name, tensor in self.source.tensors.items():
                assert torch.equal(received[name], server.shard(worker, tensor)), name

    def send(self, *committed: int) -> dict[int, str]:
        """A sync that exactly these replicas complete; why the others did not."""
        self.source.step()
        report = self.trainer.send_weights()
        assert report.committed == committed
        assert sorted((*report.committed, *report.dropped)) == [0, 1]
        for replica in committed:
            self.assert_exact(replica)
        return dict(report.dropped)


@pytest.mark.parametrize("call", [*CALLS, "answer"])
def test_a_server_that_refuses_is_dropped_alone_and_comes_back(make_wire, caplog, call):
    with Fleet(make_wire, NEVER_SECONDS) as fleet:
        fleet.servers[1].troubles[call] = refusing(call)
        dropped = fleet.send(0)
        assert f"{call}: HTTP 500: no memory" in dropped[1]
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert f"epoch 1: replica 1 goes without: {dropped[1]}" in warnings
        fleet.servers[1].troubles.clear()
        assert fleet.send(0, 1) == {}
        assert fleet.servers[1].calls.count("init") == 2
        assert fleet.servers[0].calls == ["init", *CALLS * 2]


def test_a_worker_that_cannot_install_drops_its_replica_alone(make_wire):
    bad = ["scatter failed"]

    def before_scatter(worker: int, chunk: object) -> None:
        if bad and worker == 1:
            raise ZeroDivisionError(bad.pop())

    with Fleet(make_wire, NEVER_SECONDS, before_scatter=before_scatter) as fleet:
        assert "scatter failed" in fleet.send(0)[1]
        assert fleet.send(0, 1) == {}


@pytest.mark.parametrize("dies_at", ["layers.0.w", "layers.3.w", "layers.5.w"])
def test_a_replica_that_dies_is_named_and_the_other_finishes(make_wire, dies_at):
    with Fleet(make_wire, NEVER_SECONDS) as fleet:

        def kill(name: str) -> None:
            if name == dies_at:
                fleet.source.meanwhile = lambda name: None
                server = fleet.servers[1]
                for worker, client in server._clients.items():  # all that others see of a death
                    server._consumers[worker].fail(SyncAbortedError("this process died"))
                    client.close()

        fleet.source.meanwhile = kill
        told = fleet.send(0)[1]  # by the rendezvous, or by one of the server's threads: the first
        assert any(each in told for each in ("its connection closed", "died", "client of the"))
        assert fleet.send(0, 1) == {}


def test_between_two_syncs_a_server_goes_and_another_comes_in_its_place(make_wire):
    with Fleet(make_wire, NEVER_SECONDS) as fleet:
        assert fleet.send(0, 1) == {}
        server = fleet.servers[1]
        server.close()
        server.troubles["init"] = refusing("init")
        dropped = fleet.send(0)
        assert dropped[1].startswith("it took no part: consumer r1w")
        assert dropped[1].endswith(" left")
        server.troubles.clear()
        server._num_workers = 1  # the one that comes is of another size
        assert fleet.send(0, 1) == {}
        assert len(server.workers) == 1


@pytest.mark.parametrize("make_wire", ["inprocess"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_hangs_is_dropped_at_the_deadline_and_skipped(
    make_wire, release, monkeypatch, call
):
    for module in ("control", "job"):
        monkeypatch.setattr(f"rdt_trainer.{module}.LAST_WORDS_SECONDS", 0.1)
    with Fleet(make_wire, 6.0) as fleet:
        fleet.servers[1].troubles[call] = lambda: release.wait(60) and None
        seconds = 6 if call == "finish" else 3  # groups are held for who does not pull
        late = f"waited {seconds} seconds for the end of {call}() on replica 1 (torch engine)"
        assert late in fleet.send(0)[1]
        calls = list(fleet.servers[1].calls)
        assert "took no part" in fleet.send(0)[1]
        assert fleet.servers[1].calls == calls  # it is in one call at a time
        fleet.servers[1].troubles.clear()
        release.set()
        assert fleet.trainer._job is not None and fleet.trainer._job.control is not None
        assert fleet.trainer._job.control.wait(30)
        assert fleet.send(0, 1) == {}


def test_a_drop_told_before_the_servers_are_driven_is_heeded(make_wire, release, monkeypatch):
    """Nobody waits for the calls of a server whose replica is out of the epoch already."""
    with Fleet(make_wire, NEVER_SECONDS) as fleet:
        assert fleet.trainer._job is not None
        producer, rendezvous = fleet.trainer._job.producer, fleet.trainer._job.rendezvous
        begin, heard = producer.begin, threading.Event()
        on_event = producer.on_event

        def listen(event: object) -> None:  # the trainer has heard it before
            on_event(event)
            if isinstance(event, ConsumerDropped):
                heard.set()

        def begin_and_drop(record: EpochRecord) -> None:
            begin(record)
            consumer, incarnation = next(each for each in record.live if each[0].replica == 1)
            rendezvous.drop(consumer, incarnation, "its worker is lost")
            assert heard.wait(30)

        monkeypatch.setattr(producer, "on_event", listen)
        monkeypatch.setattr(producer, "begin", begin_and_drop)
        fleet.servers[1].troubles["start"] = lambda: release.wait(NEVER_SECONDS) and None
        assert "its worker is lost" in fleet.send(0)[1]
        assert fleet.trainer._job.control is not None and fleet.trainer._job.control.is_busy(1)
        release.set()


def test_no_replica_left_raises_with_every_reason(make_wire):
    with Fleet(make_wire, NEVER_SECONDS) as fleet:
        fleet.servers[0].troubles["update"] = refusing("update")
        fleet.servers[1].troubles["finish"] = refusing("finish")
        with pytest.raises(SyncFailedError, match=r"epoch 1 failed: no replica is left") as caught:
            fleet.trainer.send_weights()
        assert "replica 0: r0w0: update: HTTP 500" in caught.value.reason
        assert "replica 1: r1w0: finish: HTTP 500" in caught.value.reason
        assert isinstance(caught.value.__cause__, ClientError)
        for server in fleet.servers:
            server.troubles.clear()
        assert fleet.send(0, 1) == {}


def test_who_cannot_come_back_is_told_at_once_and_the_same_epoch_comes_next(make_wire):
    with Fleet(make_wire, NEVER_SECONDS) as fleet:
        for server in fleet.servers:
            server.close()
            server.troubles["init"] = refusing("init")
        with pytest.raises(SyncFailedError, match="init: HTTP 500: no memory") as caught:
            fleet.trainer.send_weights()
        assert str(caught.value).startswith("sync of epoch 1 failed: init")
        assert not hasattr(caught.value, "__notes__")  # nothing was published, so nobody reads
        for server in fleet.servers:
            server.troubles.clear()
        fleet.source.step()
        assert fleet.trainer.send_weights().epoch == 1


def test_what_fails_everybody_fences_nobody(make_wire, caplog):
    """A source that raises: the replicas take part in the next epoch as they are."""
    caplog.set_level(logging.INFO)
    with Fleet(make_wire, NEVER_SECONDS) as fleet:

        def fail(name: str) -> None:
            if name == "layers.4.w":
                fleet.source.meanwhile = lambda name: None
                raise ZeroDivisionError("gather failed")

        fleet.source.meanwhile = fail
        with pytest.raises(Exception, match="gather failed"):
            fleet.trainer.send_weights()
        assert fleet.send(0, 1) == {}
        assert [server.calls.count("init") for server in fleet.servers] == [1, 1]


def test_all_ranks_report_the_same_outcome(make_wire, monkeypatch):
    """Two ranks before two replicas: one that is dropped and comes back, then none that is left."""
    settings = JobSettings(num_producers=2, num_replicas=2)
    host = host_local("ranks", "token", settings)
    servers = [Server(make_wire), Server(make_wire, 2)]
    trainers = [
        RdtTrainer(
            Source(),
            servers if rank == 0 else None,
            rank=rank,
            settings=settings,
            rendezvous=host.address,
            make_wire=lambda rank=rank: make_wire(f"producer{rank}"),
            timeout_seconds=NEVER_SECONDS,
        )
        for rank in range(2)
    ]
    with closing(host), ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for each in trainers:
            stack.callback(each.close)
        list(pool.map(RdtTrainer.init, trainers))
        servers[1].troubles["answer"] = refusing("answer")
        send = RdtTrainer.send_weights
        first, second = pool.map(send, trainers)
        assert (first.committed, first.dropped) == (second.committed, second.dropped)
        assert first.committed == (0,)
        del servers[1].troubles["answer"]
        servers[1].troubles["init"] = lambda: time.sleep(0.2)  # rank 1 is there before
        patience: dict[int, float] = {}
        begin = RendezvousClient.begin

        def noted(client: RendezvousClient, rank: int, epoch: int, seconds: float) -> EpochRecord:
            patience[rank] = seconds
            return begin(client, rank, epoch, seconds)

        monkeypatch.setattr(RendezvousClient, "begin", noted)
        assert [each.committed for each in pool.map(send, trainers)] == [(0, 1), (0, 1)]
        # Rank 0 may wait for an earlier call to end, then for servers to come back, then begin.
        assert patience[1] > 3 * patience[0]
        servers[1].troubles["answer"] = refusing("answer")
        servers[0].troubles["update"] = refusing("update")
        calls = [pool.submit(each.send_weights) for each in trainers]
        texts = {str(call.exception()) for call in calls}
        assert len(texts) == 1, texts
        assert "no replica is left" in texts.pop()
