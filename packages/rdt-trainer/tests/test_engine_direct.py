"""Stable tensors: workers read them from the trainer's own memory, both wires."""

import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from rdt_trainer import (
    JobSettings,
    ModuleSource,
    RdtTrainer,
    SettingsError,
    SourceError,
    SourceMeta,
)
from rdt_trainer.collector import GroupCollector
from rdt_trainer.driving import Driving
from rdt_trainer.tensor_versions import TensorVersions
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.producer import Producer
from rdt_transport.rendezvous import EpochOutcome, RendezvousClient
from rdt_transport.stable_sources import StableSources
from rdt_transport.wire.base import Wire
from rdt_transport.wire.nixl import NixlWire

MakeWire = Callable[[str], Wire]


class Model(nn.Module):
    """Three layers whose weights are served as they are, and one tensor that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 4, dtype=torch.bfloat16) for _ in range(3))
        self.turned = nn.Parameter(torch.randn(6, 4).t())  # copied in every pass

    def randomise(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape))


def trainer(source: object, client: object, make_wire: MakeWire, **options) -> RdtTrainer:
    options.setdefault("timeout_seconds", 20.0)
    return RdtTrainer(source, client, make_wire=lambda: make_wire("producer"), **options)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def snapshot(model: nn.Module) -> dict[str, list[int]]:
    return {name: bits(tensor) for name, tensor in model.named_parameters()}


def received(client: TorchEngineClient) -> dict[str, list[int]]:
    """The workers' rows, put together again."""
    found = {}
    for name in client.workers[0]:
        parts = [worker[name] for worker in client.workers]
        found[name] = bits(torch.cat(parts))
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_epoch_arrives_bit_for_bit_partly_directly(make_wire, num_workers, lookahead):
    model, client = Model(), TorchEngineClient(make_wire, num_workers=num_workers)
    settings = JobSettings(num_producers=1, max_chunk_bytes=16, lookahead=lookahead)
    with trainer(ModuleSource(model), client, make_wire, settings=settings) as rdt:
        rdt.init()
        for _ in range(3):
            model.randomise()
            report = rdt.send_weights()
            assert received(client) == snapshot(model)
            direct = sum(p.nbytes for name, p in model.named_parameters() if name != "turned")
            assert client.bytes_pulled() == (direct, model.turned.nbytes)
            assert (report.bytes_direct, report.bytes_staged) == (direct, model.turned.nbytes)


@pytest.mark.parametrize(
    ("stable", "direct"), [(False, True), (True, False)], ids=["trainer", "worker"]
)
def test_either_side_may_want_slots_only(make_wire, stable, direct):
    model, client = Model(), TorchEngineClient(make_wire, direct=direct)
    with trainer(ModuleSource(model, stable=stable), client, make_wire) as rdt:
        rdt.init()
        report = rdt.send_weights()
    assert received(client) == snapshot(model)
    assert report.bytes_direct == 0 < report.bytes_staged


# ---- nobody reads the parameters once send_weights has returned ----------------------------------


class LateClient(TorchEngineClient):
    """Its workers begin to pull after an optimizer step, if one comes before they lose patience."""

    def __init__(self, make_wire: MakeWire) -> None:
        super().__init__(make_wire)
        self.stepped = threading.Event()
        self.has_pulled = threading.Event()

    def update(self, update_info: Mapping[str, object]) -> None:
        self.stepped.wait(0.5)
        super().update(update_info)

    def finish(self, weight_version: str | None = None) -> None:
        super().finish(weight_version)
        self.has_pulled.set()


def sent_and_stepped(make_wire: MakeWire) -> tuple[dict, dict]:
    """What the model was when it was sent, and what arrived, with a step right after the return."""
    model, client = Model(), LateClient(make_wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with trainer(ModuleSource(model), client, make_wire) as rdt:
        rdt.init()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        sent = snapshot(model)
        rdt.send_weights()
        optimizer.step()
        client.stepped.set()
        assert client.has_pulled.wait(20)
        return sent, received(client)


def test_an_optimizer_may_step_as_soon_as_send_weights_has_returned(make_wire):
    sent, arrived = sent_and_stepped(make_wire)
    assert arrived == sent


def test_without_its_waits_the_step_would_be_seen(make_wire, monkeypatch):
    monkeypatch.setattr(Producer, "finish", lambda *_: None)
    monkeypatch.setattr(Driving, "wait", lambda *_: None)
    monkeypatch.setattr(RendezvousClient, "await_close", lambda *_: EpochOutcome(1, (0,), ()))
    sent, arrived = sent_and_stepped(make_wire)
    torn = [name for name in sent if arrived[name] != sent[name]]
    assert torn == [name for name in sent if name != "turned"]  # that one is a copy


# ---- what is refused ----------------------------------------------------------------------------


def test_a_parameter_that_was_replaced_is_refused_by_name_until_it_is_back(make_wire):
    model, client = Model(), TorchEngineClient(make_wire)
    with trainer(ModuleSource(model), client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights("good")
        mine = model.layers[1].weight
        model.layers[1].weight = nn.Parameter(mine.detach().clone())
        with pytest.raises(SourceError, match=r"rank 0: layers\.1\.weight: .* registered"):
            rdt.send_weights("bad")
        assert client.weight_version == "good"
        model.layers[1].weight = mine
        model.randomise()
        rdt.send_weights()
        assert received(client) == snapshot(model)


def test_a_parameter_that_was_replaced_is_sent_by_a_source_that_is_not_stable(make_wire):
    model, client = Model(), TorchEngineClient(make_wire)
    with trainer(ModuleSource(model, stable=False), client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights()
        model.layers[1].weight = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
        rdt.send_weights()
        assert received(client) == snapshot(model)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_a_device_that_is_not_served_is_refused(inprocess, device):
    with trainer(ModuleSource(Model()), [object()], inprocess, device=device) as rdt:
        with pytest.raises(SettingsError, match=rf"device is {device}(?s:.*)leave\s+device= out"):
            rdt.init()


class Declares(ModuleSource):
    """Says that other tensors are stable."""

    others: Mapping[str, torch.Tensor]

    def stable_tensors(self) -> dict[str, torch.Tensor]:
        return super().stable_tensors() | self.others


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"layers.9.weight": torch.empty(2)},
            r"has layers\.9\.weight, of which this rank holds nothing",
        ),
        (
            {"turned": torch.empty(6, 4).t()},
            "has a Tensor for turned: expected a plain, contiguous",
        ),
    ],
)
def test_stable_tensors_that_cannot_be_are_refused(inprocess, others, message):
    source = Declares(Model())
    source.others = others
    with trainer(source, [object()], inprocess) as rdt:
        with pytest.raises(SourceError, match=message):
            rdt.init()


# ---- nothing is done for each stable name --------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> list[object]:
    """The calls of a method, from now on."""
    calls: list[object] = []
    original = getattr(owner, method)

    def call(self, *arguments, **options):
        calls.append(arguments)
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, method, call)
    return calls


@pytest.mark.parametrize("num_layers", [2, 20])
def test_a_sync_of_stable_tensors_takes_as_many_steps_for_many_as_for_few(
    inprocess, monkeypatch, num_layers
):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    client = TorchEngineClient(inprocess)
    with trainer(ModuleSource(model), client, inprocess) as rdt:
        rdt.init()
        rdt.send_weights()
        collected = counted(monkeypatch, GroupCollector, "collect")
        checked = counted(monkeypatch, StableSources, "checked")
        noted = counted(monkeypatch, TensorVersions, "note")
        sent = counted(monkeypatch, Producer, "_publish")
        with torch.no_grad():
            model[0].weight.add_(1)
        report = rdt.send_weights()
        assert (collected, checked, noted) == ([], [], [])
        num_groups = len(rdt._job.producer.groups)
        assert [len(groups) for _, groups, _ in sent] == [num_groups - 1, 1]
        assert received(client) == snapshot(model)
        assert report.num_bytes == sum(p.nbytes for p in model.parameters())


class Asked(ModuleSource):
    """Something happens when it is asked for its stable tensors."""

    ask: Callable[[], object] = staticmethod(lambda: None)

    def stable_tensors(self):
        self.ask()
        return super().stable_tensors()


def test_nobody_has_all_before_the_source_said_that_its_tensors_stand(make_wire):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    source, client = Asked(model), TorchEngineClient(make_wire)
    with trainer(source, client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights()
        with torch.no_grad():
            model[0].weight.add_(1)
            model[1].weight.add_(1)
            old = bits(model[2].weight)
            model[2].weight.add_(1)

        def replace():
            deadline = time.monotonic() + 20
            while any(received(client)[f"{i}.weight"] != bits(model[i].weight) for i in (0, 1)):
                assert time.monotonic() < deadline, "more than the last group is held back"
                time.sleep(0.01)
            assert received(client)["2.weight"] == old
            model[1].weight = nn.Parameter(torch.zeros(4, 4))

        source.ask = replace
        with pytest.raises(SourceError, match=r"1\.weight: .* registered"):
            rdt.send_weights()
        assert received(client)["2.weight"] == old
        assert client.weight_version == "1"


def test_only_what_is_not_stable_is_collected(inprocess, monkeypatch):
    model, client = Model(), TorchEngineClient(inprocess)
    with trainer(ModuleSource(model), client, inprocess) as rdt:
        rdt.init()
        noted = counted(monkeypatch, TensorVersions, "note")
        rdt.send_weights()
        assert [name for name, _ in noted] == ["turned"]


class Meddler(ModuleSource):
    """Something changes a parameter while the sync is under way."""

    meddle: Callable[[], object] = staticmethod(lambda: None)

    def iter_rest(self, stable):
        yield from super().iter_rest(stable)
        self.meddle()


def test_a_parameter_that_changes_in_place_meanwhile_is_refused_by_name(make_wire):
    model, client = Model(), TorchEngineClient(make_wire)
    source = Meddler(model)
    with trainer(source, client, make_wire) as rdt:
        rdt.init()
        rdt.send_weights()
        source.meddle = lambda: model.layers[1].bias.requires_grad_(False).add_(1)
        with pytest.raises(SourceError, match=r"rank 0: layers\.1\.bias changed in place"):
            rdt.send_weights()
        source.meddle = lambda: None
        rdt.send_weights()
        assert received(client) == snapshot(model)


def test_the_rendezvous_knows_of_a_failure_before_the_caller_may_step(inprocess, monkeypatch):
    known: list[int] = []

    def fail(self: RendezvousClient, epoch: int, *args) -> None:
        tell(self, epoch, *args)
        time.sleep(0.2)  # whoever does not wait for the answer is past it
        known.append(epoch)

    tell = RendezvousClient.fail
    monkeypatch.setattr(RendezvousClient, "fail", fail)
    model = Model()
    source = Meddler(model)
    with trainer(source, TorchEngineClient(inprocess), inprocess) as rdt:
        rdt.init()
        source.meddle = lambda: model.layers[1].bias.requires_grad_(False).add_(1)
        with pytest.raises(SourceError, match="changed in place"):
            rdt.send_weights()
        assert known == [1]  # so nobody commits what he still reads


@pytest.mark.parametrize("served", ["bfloat16", "as it is"])
def test_a_parameter_of_another_shape_is_refused_by_name(inprocess, served):
    dtype = torch.bfloat16 if served == "bfloat16" else None
    model, client = Model(), TorchEngineClient(inprocess)
    with trainer(ModuleSource(model, dtype=dtype), client, inprocess) as rdt:
        rdt.init()
        rdt.send_weights()
        weight = model.layers[1].weight
        weight.data = weight.data.reshape(5, 4)  # the same memory
        with pytest.raises(SourceError, match=r"layers\.1\.weight is now \[5, 4\]"):
            rdt.send_weights()


class Plain:
    """A source of stable tensors that are in every pass all the same."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.metadata = [SourceMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]

    def iter_full(self):
        return iter(self.tensors.items())

    def stable_tensors(self):
        return self.tensors


def test_a_source_that_cannot_leave_its_stable_tensors_out_is_checked_name_by_name(inprocess):
    tensors = {f"layers.{i}.w": torch.randn(3, 2) for i in range(3)}
    client = TorchEngineClient(inprocess)
    with trainer(Plain(tensors), client, inprocess) as rdt:
        rdt.init()
        assert rdt.send_weights().bytes_staged == 0
        assert received(client) == {name: bits(tensor) for name, tensor in tensors.items()}
        tensors["layers.1.w"] = torch.randn(3, 2)
        with pytest.raises(SourceError, match=r"layers\.1\.w: .* registered"):
            rdt.send_weights()


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_model_on_a_gpu_is_sent_to_one(direct, num_workers):
    model = Model().cuda()
    client = TorchEngineClient(NixlWire, num_workers=num_workers, direct=direct, device="cuda")
    with trainer(ModuleSource(model), client, NixlWire) as rdt:
        rdt.init()
        for _ in range(3):
            model.randomise()
            report = rdt.send_weights()
            torch.cuda.synchronize()
            assert received(client) == snapshot(model)
            assert (report.bytes_direct > 0) is direct
