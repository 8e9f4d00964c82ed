"""One trainer rank, real sessions and consumers, both wires: bytes compared, failures provoked."""

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from rdt_plan import ManifestError
from rdt_trainer import (
    ClientError,
    JobSettings,
    ModuleSource,
    RdtTrainer,
    SettingsError,
    SourceError,
    SourceMeta,
    SyncFailedError,
    TrainerStateError,
)
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire

NEVER_SECONDS = 300.0  # of waits that must end before; a test that needs them has failed
MakeWire = Callable[[str], Wire]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith(("rdt-", "worker", "producer"))]


def tensors(num_layers: int = 4) -> dict[str, torch.Tensor]:
    found = {"embed": torch.empty(8, 6, dtype=torch.bfloat16)}
    for layer in range(num_layers):
        found[f"layers.{layer}.w"] = torch.empty(8, 5)
        found[f"layers.{layer}.b"] = torch.empty(7, dtype=torch.bfloat16)
    found["norm"] = torch.empty(())
    return found


class Source:
    """Yields tensors by name; ``tamper`` may replace what a pass yields, or raise."""

    def __init__(self, **kwargs: int) -> None:
        self.tensors = tensors(**kwargs)
        self.tamper: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None = None
        self.yielded: list[str] = []
        self.randomise()

    def randomise(self) -> None:
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.yielded = []
        for name, tensor in self.tensors.items():
            self.yielded.append(name)
            yield self.tamper(name, tensor) if self.tamper else (name, tensor)


def assert_exact(client: TorchEngineClient, expected: dict[str, torch.Tensor]) -> None:
    for worker, received in enumerate(client.workers):
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            part = client.shard(worker, tensor.detach())
            assert received[name].dtype == part.dtype
            assert torch.equal(
                received[name].flatten().view(torch.uint8),
                part.contiguous().flatten().view(torch.uint8),
            ), name


def trainer(source: object, client: object, make_wire: MakeWire, **options) -> RdtTrainer:
    options.setdefault("timeout_seconds", 20.0)
    return RdtTrainer(source, client, make_wire=lambda: make_wire("producer"), **options)


# ---- what is sent arrives ------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_epoch_arrives_bit_for_bit(make_wire, num_workers):
    source, client = Source(), TorchEngineClient(make_wire, num_workers=num_workers)
    settings = JobSettings(num_producers=1, max_chunk_bytes=64)
    with trainer(source, client, make_wire, settings=settings) as rdt:
        rdt.init()
        for epoch in (1, 2, 3):
            source.randomise()
            report = rdt.send_weights()
            assert_exact(client, source.tensors)
            assert report.epoch == epoch
            assert report.num_bytes == sum(t.nbytes for t in source.tensors.values())
            assert client.weight_version == str(epoch)
        rdt.send_weights("step 900")
        assert client.weight_version == "step 900"
    assert client.calls == ["init", *["start", "update", "finish"] * 4, "shutdown"]


def test_times_of_a_report_add_up(inprocess):
    with trainer(Source(), TorchEngineClient(inprocess), inprocess) as rdt:
        rdt.init()
        report = rdt.send_weights()
    stages = (
        report.begin_seconds,
        report.gather_seconds,
        report.publish_seconds,
        report.wait_seconds,
        report.finish_seconds,
    )
    assert all(seconds > 0 for seconds in stages)
    assert sum(stages) <= report.total_seconds


def test_a_module_is_served_in_another_dtype(make_wire):
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    client = TorchEngineClient(make_wire, num_workers=2)
    with trainer(ModuleSource(model, dtype=torch.bfloat16), client, make_wire) as rdt:
        rdt.init()
        for _ in range(2):
            rdt.send_weights()
            expected = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
            assert_exact(client, expected)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)


def test_every_replica_receives_everything(make_wire):
    source = Source()
    clients = [TorchEngineClient(make_wire), TorchEngineClient(make_wire, num_workers=2)]
    with trainer(source, clients, make_wire) as rdt:
        rdt.init()
        for _ in range(2):
            source.randomise()
            rdt.send_weights()
            for client in clients:
                assert_exact(client, source.tensors)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_no_more_groups_are_resident_than_lookahead_allows(inprocess, lookahead):
    """Fresh tensors, as a gather makes them: those of released groups must be gone."""
    source, client = Source(num_layers=8), TorchEngineClient(inprocess)
    alive: list[tuple[str, weakref.ref]] = []
    most = 0

    def gathered(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        nonlocal most
        fresh = tensor.clone()
        alive.append((name.rpartition(".")[0] or name, weakref.ref(fresh.untyped_storage())))
        most = max(most, len({group for group, storage in alive if storage() is not None}))
        return name, fresh

    source.tamper = gathered
    settings = JobSettings(num_producers=1, lookahead=lookahead)
    with trainer(source, client, inprocess, settings=settings) as rdt:
        rdt.init()
        rdt.send_weights()
    assert_exact(client, source.tensors)
    assert 1 <= most <= lookahead + 1
    assert not [group for group, storage in alive if storage() is not None]


# ---- what fails, fails at once, and heals --------------------------------------------------------


def heals(rdt: RdtTrainer, source: Source, *clients: TorchEngineClient) -> None:
    source.tamper = None
    source.randomise()
    rdt.send_weights()
    for client in clients:
        assert_exact(client, source.tensors)


@pytest.mark.parametrize(
    ("tampered", "message"),
    [
        (("layers.9.w", torch.zeros(8, 5)), r"yielded layers\.9\.w, expected layers\.1\.w"),
        (("layers.1.w", torch.zeros(5, 8)), r"layers\.1\.w is float32\[5, 8\], expected"),
        (("layers.1.w", torch.zeros(8, 5).half()), r"layers\.1\.w is float16\[8, 5\], expected"),
    ],
)
def test_a_source_that_yields_other_than_declared(make_wire, tampered, message):
    source, client = Source(), TorchEngineClient(make_wire, num_workers=2)
    with trainer(source, client, make_wire, timeout_seconds=NEVER_SECONDS) as rdt:
        rdt.init()
        rdt.send_weights()
        source.tamper = lambda name, tensor: tampered if name == "layers.1.w" else (name, tensor)
        with pytest.raises(SourceError, match=message):
            rdt.send_weights()
        assert source.yielded == list(source.tensors)  # the pass ran to its end all the same
        heals(rdt, source, client)


def test_a_source_that_raises(make_wire):
    source, client = Source(), TorchEngineClient(make_wire)

    def gather(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name == "layers.2.b":
            raise ZeroDivisionError("all-gather failed")
        return name, tensor

    with trainer(source, client, make_wire, timeout_seconds=NEVER_SECONDS) as rdt:
        rdt.init()
        source.tamper = gather
        with pytest.raises(SourceError, match=r"rank 0.*ZeroDivisionError: all-gather") as caught:
            rdt.send_weights()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        heals(rdt, source, client)


def test_an_interrupt_reaches_the_caller_and_leaves_nothing_open(inprocess):
    source, client = Source(), TorchEngineClient(inprocess)

    def interrupted(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name == "layers.2.b":
            raise KeyboardInterrupt
        return name, tensor

    with trainer(source, client, inprocess, timeout_seconds=NEVER_SECONDS) as rdt:
        rdt.init()
        source.tamper = interrupted
        with pytest.raises(KeyboardInterrupt):
            rdt.send_weights()
        assert source.yielded[-1] == "layers.2.b"
        heals(rdt, source, client)


class Refusing(TorchEngineClient):
    """Its ``refuses`` method fails as a server does that answers HTTP 500."""

    refuses = ""

    def start(self):
        self._refuse("start")
        super().start()

    def update(self, update_info):
        self._refuse("update")
        super().update(update_info)

    def finish(self, weight_version=None):
        super().finish(weight_version)
        self._refuse("finish")

    def _refuse(self, call: str) -> None:
        if self.refuses == call:
            raise ClientError(f"{call}: HTTP 500: no memory", server_text="no memory", status=500)


@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_a_server_that_refuses(make_wire, call):
    """Nobody pulls, so the trainer waits for credit when the server's words arrive."""
    source, client = Source(), Refusing(make_wire, num_workers=2)
    with trainer(source, client, make_wire, timeout_seconds=NEVER_SECONDS) as rdt:
        rdt.init()
        client.refuses = call
        with pytest.raises(SyncFailedError, match=r"epoch 1 failed.*no memory.*torn") as caught:
            rdt.send_weights()
        assert isinstance(caught.value.__cause__, ClientError)
        assert caught.value.__cause__.server_text == "no memory"
        reason = f"no replica is left: replica 0: r0w0: {call}: HTTP 500: no memory"
        assert (caught.value.epoch, caught.value.reason) == (1, reason)
        assert source.yielded == list(source.tensors)
        client.refuses = ""
        heals(rdt, source, client)
        assert client.weight_version == "2"


def test_a_worker_that_cannot_install(make_wire):
    bad = []

    def before_scatter(worker: int, chunk: object) -> None:
        if bad and worker == 1:
            raise ZeroDivisionError(bad.pop())

    source = Source()
    client = TorchEngineClient(make_wire, num_workers=2, before_scatter=before_scatter)
    with trainer(source, client, make_wire, timeout_seconds=NEVER_SECONDS) as rdt:
        rdt.init()
        bad.append("scatter failed")
        with pytest.raises(SyncFailedError, match="scatter failed"):
            rdt.send_weights()
        heals(rdt, source, client)


def test_a_rendezvous_that_dies_ends_the_sync_at_once(inprocess):
    source, client = Source(), TorchEngineClient(inprocess, timeout_seconds=1)
    host = host_local("dies", "token", JobSettings(num_producers=1, lookahead=0))

    def gathered(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name == "layers.1.w":
            host.close()
        return name, tensor

    options = {"rendezvous": host.address, "timeout_seconds": NEVER_SECONDS}
    settings = JobSettings(num_producers=1, lookahead=0)
    with trainer(source, client, inprocess, settings=settings, **options) as rdt:
        rdt.init()
        source.tamper = gathered
        with pytest.raises(SyncFailedError, match=r"rendezvous is gone|was dropped") as caught:
            rdt.send_weights()
        assert any("leave these unchanged" in note for note in caught.value.__notes__)
        assert source.yielded == list(source.tensors)
        with pytest.raises(SyncFailedError, match="epoch 2 failed"):
            rdt.send_weights()


# ---- opening and closing -------------------------------------------------------------------------


def test_a_source_without_a_pass_is_refused_before_anything_opens(inprocess):
    class Described:
        metadata = Source().metadata

    client = TorchEngineClient(inprocess)
    with trainer(Described(), client, inprocess) as rdt:
        with pytest.raises(SourceError, match="iter_full"):
            rdt.init()
    assert client.calls == []


def test_a_source_whose_groups_are_interrupted_is_refused(inprocess):
    source = Source()
    source.tensors["layers.0.late"] = torch.zeros(1)
    with trainer(source, TorchEngineClient(inprocess), inprocess) as rdt:
        with pytest.raises(ManifestError, match=r"layers\.0\.late.*group_ordered"):
            rdt.init()


def test_a_server_that_cannot_be_initialised(inprocess):
    class Broken(TorchEngineClient):
        def init(self, init_info):
            raise ClientError("init: HTTP 500: no such backend", server_text="no such backend")

    rdt = trainer(Source(), Broken(inprocess), inprocess)
    with pytest.raises(ClientError, match="no such backend"):
        rdt.init()
    with pytest.raises(TrainerStateError, match="before init"):
        rdt.send_weights()
    rdt.close()


def test_a_server_whose_workers_do_not_attach(inprocess):
    class Silent(TorchEngineClient):
        def init(self, init_info):
            pass

    with trainer(Source(), Silent(inprocess), inprocess) as rdt:
        with pytest.raises(ClientError, match=r"replica 0 has 0 workers attached.*rdt"):
            rdt.init()


def test_life_has_an_order(inprocess):
    rdt = trainer(Source(), TorchEngineClient(inprocess), inprocess)
    with pytest.raises(TrainerStateError, match="before init"):
        rdt.send_weights()
    with pytest.raises(TrainerStateError, match="cannot be attached"):
        rdt.attach()
    rdt.init()
    with pytest.raises(TrainerStateError, match="already"):
        rdt.init()
    with pytest.raises(TrainerStateError, match="replica 1 cannot be attached"):
        rdt.attach(1)
    rdt.close()
    rdt.close()
    for use in (rdt.init, rdt.send_weights, rdt.attach):
        with pytest.raises(TrainerStateError, match="closed"):
            use()


def test_two_threads_may_not_use_one_trainer(inprocess):
    source, client = Source(), TorchEngineClient(inprocess)
    refused = []

    def meanwhile(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name == "norm":
            with pytest.raises(TrainerStateError, match="another thread") as caught:
                rdt.send_weights()
            refused.append(caught.value)
        return name, tensor

    with trainer(source, client, inprocess) as rdt:
        rdt.init()
        source.tamper = meanwhile
        rdt.send_weights()
        assert len(refused) == 1
        assert_exact(client, source.tensors)


@pytest.mark.parametrize(
    ("rank", "num_clients", "settings", "message"),
    [
        (2, 0, JobSettings(num_producers=2), "rank 2 is not among the 2 producers"),
        (1, 1, JobSettings(num_producers=2), "rank 1 was given a client"),
        (0, 0, None, "0 clients for 1 replicas"),
        (0, 1, JobSettings(num_producers=1, num_replicas=2), "1 clients for 2 replicas"),
    ],
)
def test_arguments_must_agree(inprocess, rank, num_clients, settings, message):
    clients = [TorchEngineClient(inprocess) for _ in range(num_clients)]
    with pytest.raises(SettingsError, match=message):
        RdtTrainer(Source(), clients, rank=rank, settings=settings)
