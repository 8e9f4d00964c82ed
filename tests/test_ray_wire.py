"""Real vLLMs synced over Ray Direct Transport: workers that attach as drivers, and in an actor."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import Client, LocalClient, ModuleSource, RayClient, RdtTrainer
from rdt_transport.rendezvous import JobSettings
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.engine_actor import EngineActor
from rdt_vllm.testing.report import DEFAULT_PROMPT, check_exact, greedy_tokens, observe
from rdt_vllm.testing.serving import serving
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = JobSettings(num_producers=1, max_chunk_bytes=16 << 10)


@pytest.fixture
def cluster() -> Iterator[Any]:
    import ray

    options = {"memory_monitor_refresh_ms": 0}  # an office must not go because tests take memory
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=options
    )
    yield ray
    ray.shutdown()
    # Ray keeps its agent, and the port it listens on, for as long as this process lives.
    nixl: Any = import_module("ray.experimental.rdt.util").get_tensor_transport_manager("NIXL")
    nixl._nixl_agent = None


def trainer(source: ModuleSource, client: Client, **options: Any) -> RdtTrainer:
    return RdtTrainer(source, client, settings=SETTINGS, timeout_seconds=120, **options)


def test_a_worker_that_is_no_actor_is_exact_and_outlives_the_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    model = TINY_QWEN3.build(seed=1)
    source = ModuleSource(model)
    # Started after the cluster: where that authenticates, the environment says so.
    with serving(write_checkpoint(model, tmp_path / "served")) as engine:
        llm: Any = engine
        with trainer(source, LocalClient(llm), wire="ray") as rdt:
            rdt.init()
            for seed in (2, 3):
                draw_weights(model, seed)
                sent = write_weights(source.iter_full(), tmp_path / str(seed))
                observe(llm)
                rdt.send_weights()
                check_exact(llm, sent).require()
            for traffic in llm.collective_rpc(
                "rdt_traffic"
            ):  # norms are live on a CPU, linear layers not
                assert traffic["bytes_direct"] > 0
                assert traffic["bytes_staged"] > 0
        cluster.shutdown()
        assert greedy_tokens(llm, DEFAULT_PROMPT, 2)

        draw_weights(model, 4)
        sent = write_weights(source.iter_full(), tmp_path / "nixl")
        with trainer(source, LocalClient(llm)) as rdt:
            rdt.init()
            observe(llm)
            rdt.send_weights()
            check_exact(llm, sent).require()


def test_a_worker_in_a_ray_actor_is_exact(cluster: Any, tmp_path: Path) -> None:
    model = TINY_QWEN3.build(seed=1)
    folder = write_checkpoint(model, tmp_path / "served")
    environment = {"env_vars": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    actor = cluster.remote(num_cpus=0, runtime_env=environment)(EngineActor).remote(
        str(folder), distributed_executor_backend="uni"
    )
    source = ModuleSource(model)
    with trainer(source, RayClient(actor), wire="ray", ray="auto") as rdt:
        rdt.init()
        for seed in (2, 3):
            draw_weights(model, seed)
            sent = write_weights(source.iter_full(), tmp_path / str(seed))
            cluster.get(actor.observe.remote())
            rdt.send_weights()
            cluster.get(actor.check.remote(str(sent))).require()
    assert cluster.get(actor.consumers.remote()) == [""]  # it detached, and is in the cluster still
    cluster.get(actor.stop.remote())
