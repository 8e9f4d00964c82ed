"""What a job tells its deployments, and how long it waits for them."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from rdt_trainer import (
    ClientError,
    HttpClient,
    LocalClient,
    ModuleSource,
    RayClient,
    RdtTrainer,
    SettingsError,
    SyncFailedError,
    TrainerStateError,
)
from rdt_trainer.control import Control
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.rendezvous import JobSettings
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire


@pytest.fixture
def make_wire() -> Callable[[str], Wire]:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Whatever waits for it goes on when the test ends."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("control", "sync"):
        monkeypatch.setattr(f"rdt_trainer.{module}.LAST_WORDS_SECONDS", 0.0)


class Deployment(TorchEngineClient):
    """Says how many workers it has; ``waits_in`` is the call that does not end before release."""

    num_workers = 0
    waits_in = ""

    def __init__(self, make_wire, release: threading.Event | None = None, **options) -> None:
        super().__init__(make_wire, **options)
        self.told: list[dict] = []
        self._release = release

    def init(self, init_info):
        self.told.append(dict(init_info))
        self._wait("init")
        super().init(init_info)

    def finish(self, weight_version=None):
        self._wait("finish")
        super().finish(weight_version)

    def drop(self, worker: int, reason: str) -> None:
        """Say that a worker failed, as workers do."""
        consumer = self._consumers[worker]
        name, incarnation = consumer.plan.consumer, consumer.incarnation.hex()
        self._clients[worker].drop(name, incarnation, reason, epoch=self._epoch)

    def _wait(self, call: str) -> None:
        if self.waits_in == call and self._release is not None:
            self._release.wait()


def trainer(client, make_wire, timeout_seconds=20.0) -> RdtTrainer:
    return RdtTrainer(
        ModuleSource(nn.Linear(4, 2)),
        client,
        make_wire=lambda: make_wire("producer"),
        timeout_seconds=timeout_seconds,
    )


def test_workers_are_told_who_they_are_and_how_long_to_wait(make_wire):
    clients = [Deployment(make_wire), Deployment(make_wire, num_workers=2)]
    clients[1].num_workers = 2
    with trainer(clients, make_wire, timeout_seconds=17.5) as rdt:
        rdt.init()
        rdt.attach(1)
        address = rdt.address.init_info()
    for replica, (client, num_workers) in enumerate(zip(clients, (0, 2), strict=True)):
        for told in client.told:
            assert told == {
                **address,
                "replica": replica,
                "num_replicas": 2,
                "num_workers": num_workers,
                "timeout_seconds": 17.5,
                "wire": "nixl",
            }
    assert [len(client.told) for client in clients] == [1, 2]


def test_every_client_takes_the_number_of_workers():
    clients = [
        HttpClient("http://localhost", num_workers=4),
        LocalClient(object(), num_workers=4),
        RayClient(object(), num_workers=4),
    ]
    assert [client.num_workers for client in clients] == [4, 4, 4]
    clients[0].close()


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(SettingsError, match="object: num_workers is -1: expected"):
        RdtTrainer(object(), LocalClient(object(), num_workers=-1))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), None])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: RdtTrainer(object(), **options, rank=1, settings=JobSettings(2)),
        lambda **options: HttpClient("http://localhost", **options),
        lambda **options: LocalClient(object(), **options),
        lambda **options: RayClient(object(), **options),
    ],
)
def test_a_deadline_that_never_comes_or_has_passed_is_refused(make, seconds):
    with pytest.raises(SettingsError, match=rf"timeout_seconds is {seconds}: expected"):
        make(timeout_seconds=seconds)


def test_workers_that_are_missing_are_counted(make_wire):
    client = Deployment(make_wire, num_workers=2)
    client.num_workers = 3
    with trainer(client, make_wire) as rdt:
        with pytest.raises(ClientError, match="replica 0 has 2 workers attached, expected 3"):
            rdt.init()


def shorten(monkeypatch: pytest.MonkeyPatch, wait: str, at: int) -> None:
    """Have that wait of every `Control` end soon: no other, which would be missed at times."""
    method = getattr(Control, wait)

    def soon(*arguments):
        return method(*arguments[:at], 0.1, *arguments[at + 1 :])

    monkeypatch.setattr(Control, wait, soon)


def test_a_server_that_does_not_attach_in_time_is_named(make_wire, release, monkeypatch):
    monkeypatch.setattr("rdt_trainer.job.DETACH_TIMEOUT_SECONDS", 0.1)
    shorten(monkeypatch, "init", 2)
    client = Deployment(make_wire, release)
    client.waits_in = "init"
    with trainer(client, make_wire) as rdt:
        with pytest.raises(ClientError, match=r"0\.1 seconds for .* init\(\) on replica 0 \(torch"):
            rdt.init()


class FailsAndHangs(Deployment):
    """Its replica is dropped from a ``finish`` that does not end."""

    def _wait(self, call: str) -> None:
        if self.waits_in == call == "finish":
            self.drop(0, "it hangs")
        super()._wait(call)


@pytest.mark.parametrize("use", [RdtTrainer.attach, RdtTrainer.send_weights])
def test_a_client_is_never_in_two_calls(make_wire, release, monkeypatch, use):
    client = FailsAndHangs(make_wire, release)
    with trainer(client, make_wire) as rdt:
        rdt.init()
        client.waits_in = "finish"
        with pytest.raises(SyncFailedError, match="it hangs"):
            rdt.send_weights()
        calls = list(client.calls)
        with monkeypatch.context() as patch:
            shorten(patch, "wait", 1)
            with pytest.raises(TrainerStateError, match=r"0 \(torch engine\): an earlier call"):
                use(rdt)
        assert client.calls == calls
        client.waits_in = ""
        release.set()
        use(rdt)


# ---- what breaks between two calls needs no clean-up ---------------------------------------------


class OneWorkerFails(Deployment):
    """Worker 1's update or finish fails once, while worker 0's succeeds."""

    fails = ""

    def _start(self, worker, epoch):
        self._fail("update", worker)
        super()._start(worker, epoch)

    def _finish(self, worker):
        try:
            self._fail("finish", worker)
        except ZeroDivisionError as error:
            self.drop(worker, str(error))
            raise
        super()._finish(worker)

    def _fail(self, call: str, worker: int) -> None:
        if (self.fails, worker) == (call, 1):
            self.fails = ""
            raise ZeroDivisionError(f"{call} of worker 1 failed")


@pytest.mark.parametrize("call", ["update", "finish"])
def test_the_next_sync_heals_what_one_worker_missed(make_wire, call):
    module = nn.Linear(4, 2)
    client = OneWorkerFails(make_wire, num_workers=2)
    with RdtTrainer(
        ModuleSource(module),
        client,
        make_wire=lambda: make_wire("producer"),
        timeout_seconds=20,
    ) as rdt:
        rdt.init()
        for _ in range(2):
            client.fails = call
            with pytest.raises(SyncFailedError, match=f"{call} of worker 1 failed"):
                rdt.send_weights()
            with torch.no_grad():
                module.weight.add_(1)
            rdt.send_weights()
            for worker, received in enumerate(client.workers):
                assert torch.equal(received["weight"], client.shard(worker, module.weight))
                assert torch.equal(received["bias"], client.shard(worker, module.bias))
    healed = ["start", "update", "finish"]
    failed = healed if call == "finish" else healed[:2]
    assert client.calls == [
        *["init", *failed, "init", *healed, *failed, "init", *healed],
        "shutdown",
    ]
