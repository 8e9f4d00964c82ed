"""A vLLM worker in a Ray actor's own process, fed by a trainer whose rendezvous is in Ray.

vLLM's CPU platform refuses its Ray executor, so the actor runs a whole engine in its process: there
the worker, its transfer engine and its identity are where Ray workers have them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import ModuleSource, RayClient, RdtTrainer
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.engine_actor import EngineActor
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_an_engine_in_a_ray_actor_is_exact(ray_cluster: Any, tmp_path: Path) -> None:
    ray = ray_cluster
    model = TINY_QWEN3.build(seed=1)
    folder = write_checkpoint(model, tmp_path / "served")
    environment = {"env_vars": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    actor = ray.remote(num_cpus=0, runtime_env=environment)(EngineActor).remote(
        str(folder), distributed_executor_backend="uni"
    )
    source = ModuleSource(model)
    with RdtTrainer(source, RayClient(actor), ray="auto") as trainer:
        trainer.init()
        assert ray.get(actor.consumers.remote()) == ["r0w0"]
        for seed in (2, 3):
            draw_weights(model, seed)
            sent = write_weights(source.iter_full(), tmp_path / str(seed))
            ray.get(actor.observe.remote())
            trainer.send_weights()
            ray.get(actor.check.remote(str(sent))).require()
    ray.get(actor.stop.remote())
