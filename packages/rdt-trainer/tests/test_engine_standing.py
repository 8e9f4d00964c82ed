"""Standing groups are read before they were looked at: nobody commits what is then found wrong."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
from torch import nn

from rdt_trainer import JobSettings, ModuleSource, RdtTrainer, SourceError, SyncFailedError
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire

MakeWire = Callable[[str], Wire]
WAIT_SECONDS = 20.0
PATIENCE_SECONDS = 0.5  # of a rank that is asked, in which others would commit if they could


class Asked(ModuleSource):
    """Something happens when it is asked for its stable tensors."""

    ask: Callable[[], object] = staticmethod(lambda: None)

    def stable_tensors(self):
        self.ask()
        return super().stable_tensors()


def layers(num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


def zeroed(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(parameter))


def replaces(client: TorchEngineClient, layer: nn.Module) -> Callable[[], None]:
    """What a rank finds when it looks, after as long as a commit would take."""

    def replace() -> None:
        layer.weight = zeroed(layer.weight)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while client.weight_version == "1" and time.monotonic() < deadline:
            time.sleep(0.01)

    return replace


def test_who_reads_nothing_of_the_last_group_does_not_commit_before(make_wire):
    model, client = layers(3), TorchEngineClient(make_wire, ignores=["2.weight", "2.bias"])
    source = Asked(model)
    with RdtTrainer(
        source,
        client,
        make_wire=lambda: make_wire("producer"),
        unconsumed=["2.*"],
        timeout_seconds=WAIT_SECONDS,
    ) as rdt:
        rdt.init()
        rdt.send_weights()
        source.ask = replaces(client, model[1])
        with pytest.raises(SourceError, match=r"1\.weight: .* registered"):
            rdt.send_weights()
        assert client.weight_version == "1"


@pytest.mark.parametrize("late", [0, 1])
def test_who_reads_the_last_group_of_another_rank_does_not_commit_before(make_wire, late):
    """Two ranks hold the same, so a worker reads every other group from each of them."""
    models = [layers(4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    sources = [Asked(model) for model in models]
    client = TorchEngineClient(make_wire)
    settings = JobSettings(num_producers=2)
    with ExitStack() as stack:
        host = stack.enter_context(closing(host_local("standing", "token", settings)))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        ranks = [
            RdtTrainer(
                source,
                client if rank == 0 else None,
                rank=rank,
                settings=settings,
                rendezvous=host.address,
                make_wire=lambda rank=rank: make_wire(f"producer{rank}"),
                timeout_seconds=WAIT_SECONDS,
            )
            for rank, source in enumerate(sources)
        ]
        for rank in ranks:
            stack.callback(rank.close)
        list(pool.map(RdtTrainer.init, ranks))
        list(pool.map(RdtTrainer.send_weights, ranks))
        [read] = {each.name[0] for each in client._consumers[0].plan.table(late).chunks[0].slices}
        sources[late].ask = replaces(client, models[late][int(read)])
        calls = [pool.submit(rank.send_weights) for rank in ranks]
        errors = [call.exception() for call in calls]
        assert isinstance(errors[late], SourceError)
        assert isinstance(errors[1 - late], SyncFailedError)
        assert client.weight_version == "1"


class Model(nn.Module):
    """``mixed``: with a tensor that is copied in every pass."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
        if mixed:
            self.turned = nn.Parameter(torch.randn(6, 4).t())


def another_table(model: Model) -> None:
    layer = model.layers[1]
    layer.kept = layer._parameters
    layer._parameters = {name: zeroed(each) for name, each in layer._parameters.items()}


def other_names(model: Model) -> None:
    table = model.layers._modules
    first, second, third = table.values()
    table.clear()
    table.update({"1": first, "0": second, "2": third})


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("change", "layer"), [(another_table, 1), (other_names, 0)])
def test_a_module_of_other_tables_or_names_is_refused_and_not_committed(
    inprocess, mixed, change, layer
):
    model, client = Model(mixed=mixed), TorchEngineClient(inprocess)
    make_wire = lambda: inprocess("producer")  # noqa: E731
    with RdtTrainer(ModuleSource(model), client, make_wire=make_wire) as rdt:
        rdt.init()
        rdt.send_weights()
        change(model)
        with pytest.raises(SourceError, match=rf"layers\.{layer}\.weight: .* registered"):
            rdt.send_weights()
        assert client.weight_version == "1"
