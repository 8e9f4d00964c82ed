"""Whole syncs over Ray Direct Transport: drivers and actors on either side."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import ray
import torch

from rdt_trainer import ModuleSource, RdtTrainer, SettingsError
from rdt_trainer.client import PauseMode
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.errors import RayMissingError
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.object_process import ObjectProcess
from rdt_transport.wire.choice import WireChoice
from rdt_transport.wire.ray import RayWire

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    options = {"memory_monitor_refresh_ms": 0}  # an office must not go because tests take memory
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=options
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class Engine:
    """An inference deployment in a process of its own, which reads over the wire it is told."""

    def __init__(self, num_workers: int, direct: bool) -> None:
        self._told: Mapping[str, Any] = {}
        self._client = TorchEngineClient(
            self._wire, num_workers=num_workers, direct=direct, timeout_seconds=WAIT_SECONDS
        )

    def _wire(self, role: str) -> Any:
        wire = WireChoice.parse(self._told["wire"])
        return wire.reading(role, num_threads=0, ray_address=self._told["ray_address"])

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "init":
            self._told = arguments[0]
        return getattr(self._client, method)(*arguments)

    def weights(self) -> list[dict[str, torch.Tensor]]:
        return [{name: t.clone() for name, t in held.items()} for held in self._client.workers]

    def is_attached(self) -> bool:
        return ray.is_initialized()


@contextmanager
def engine(num_workers: int, direct: bool) -> Generator[Engine]:
    made = Engine(num_workers, direct)
    yield made
    made.call("close")


class EngineProcess(ObjectProcess):
    """A `Client` of an `Engine` in a process that a driver does not share."""

    name = "engine process"
    num_workers = 0

    def __init__(self, num_workers: int = 1, direct: bool = True) -> None:
        super().__init__(engine, num_workers, direct)

    def init(self, init_info: Mapping[str, Any]) -> None:
        self.ask("call", "init", dict(init_info))

    def start(self) -> None:
        self.ask("call", "start")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self.ask("call", "update", dict(update_info))

    def finish(self, weight_version: str | None = None) -> None:
        self.ask("call", "finish", weight_version)

    def pause(self, mode: PauseMode = "abort") -> None:
        self.ask("call", "pause", mode)

    def resume(self) -> None:
        self.ask("call", "resume")

    def reset_prefix_cache(self) -> None:
        self.ask("call", "reset_prefix_cache")

    def shutdown(self) -> None:
        self.ask("call", "shutdown")


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(48, 48), torch.nn.Embedding(31, 16), torch.nn.LayerNorm(48)] * 2
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 32).to(torch.bfloat16))


def draw(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


def check(module: torch.nn.Module, workers: list[dict[str, torch.Tensor]]) -> None:
    of = TorchEngineClient(partial(RayWire), num_workers=len(workers))
    sent = {name: tensor.detach() for name, tensor in module.named_parameters()}
    for worker, held in enumerate(workers):
        assert held.keys() == sent.keys()
        for name, tensor in sent.items():
            assert torch.equal(held[name], of.shard(worker, tensor)), name


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_five_syncs_to_workers_in_another_process_are_exact(cluster, direct):
    module = model(1)
    settings = JobSettings(num_producers=1, max_chunk_bytes=4096)
    with EngineProcess(num_workers=2, direct=direct) as client:
        with RdtTrainer(
            ModuleSource(module),
            client,
            settings=settings,
            wire="ray",
            timeout_seconds=WAIT_SECONDS,
        ) as trainer:
            trainer.init()
            for _ in range(5):
                draw(module)
                trainer.send_weights()
                check(module, client.ask("weights"))
            pulled_direct, pulled_staged = client.ask("call", "bytes_pulled")
            assert (pulled_direct > 0) is direct
            assert (pulled_staged > 0) is not direct
            assert client.ask("is_attached")
        assert not client.ask("is_attached")  # a cluster's end is nothing to it from now on


def test_the_deployment_whose_process_dies_is_dropped_and_the_other_goes_on(cluster):
    module = model(2)
    settings = JobSettings(num_producers=1, num_replicas=2)
    with EngineProcess() as doomed, EngineProcess() as other:
        with RdtTrainer(
            ModuleSource(module),
            [doomed, other],
            settings=settings,
            wire="ray",
            timeout_seconds=WAIT_SECONDS,
        ) as trainer:
            trainer.init()
            trainer.send_weights()
            doomed.kill()
            for _ in range(2):
                draw(module)
                report = trainer.send_weights()
                assert list(report.dropped) == [0]
                check(module, other.ask("weights"))


class TrainerActor:
    """A trainer in an actor: what it serves belongs to the actor, whose methods hold it up."""

    def run(self, syncs: int) -> None:
        module = model(3)
        client = TorchEngineClient(partial(RayWire, serves=False), timeout_seconds=WAIT_SECONDS)
        with EngineProcess() as process:
            clients, settings = [client, process], JobSettings(num_producers=1, num_replicas=2)
            with RdtTrainer(
                ModuleSource(module), clients, settings=settings, wire="ray", ray="auto"
            ) as trainer:
                trainer.init()
                for _ in range(syncs):
                    draw(module)
                    trainer.send_weights()
                    check(module, client.workers)
                    check(module, process.ask("weights"))


def test_a_trainer_in_an_actor_serves_a_driver(cluster):
    actor: Any = ray.remote(num_cpus=0)(TrainerActor).remote()
    ray.get(actor.run.remote(2), timeout=240)


def test_a_wire_that_is_none_is_refused():
    client = TorchEngineClient(RayWire)
    with pytest.raises(
        SettingsError, match=r"wire=: there is no wire 'rdma': expected 'nixl', 'ray' or"
    ):
        RdtTrainer(ModuleSource(model(4)), client, wire="rdma")


def test_a_trainer_must_be_attached_already(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with RdtTrainer(ModuleSource(model(4)), TorchEngineClient(RayWire), wire="ray") as trainer:
        with pytest.raises(RayMissingError, match=r"call ray\.init\(\) first"):
            trainer.init()
