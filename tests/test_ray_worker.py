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
from rdt_vllm.testing.tiny_models import TINY_QWEN3, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Worker:
    """An engine without processes of its own; the methods of ``vllm.LLM`` that a sync needs."""

    def __init__(self, folder: str) -> None:
        from rdt_vllm.testing.serving import start_engine

        self._llm = start_engine(folder, distributed_executor_backend="uni")

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self._llm.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    def observe(self) -> None:
        from rdt_vllm.testing.report import observe

        observe(self._llm)

    def check(self, folder: str) -> str:
        """What differs; empty when the worker is exact."""
        from rdt_vllm.testing.report import check_exact

        report = check_exact(self._llm, folder)
        return "" if report.ok else str(report)

    def consumer(self) -> str:
        """Which consumer the worker in this process took itself for."""
        core: Any = self._llm.llm_engine.engine_core
        worker = core.engine_core.model_executor.driver_worker.worker
        return str(worker.weight_transfer_engine._link.consumer.plan.consumer)


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
    actor = ray.remote(num_cpus=0, runtime_env=environment)(Worker).remote(str(folder))
    source = ModuleSource(model)
    with RdtTrainer(source, RayClient(actor), ray="auto") as trainer:
        trainer.init()
        assert ray.get(actor.consumer.remote()) == "r0w0"
        for seed in (2, 3):
            draw_weights(model, seed)
            sent = write_weights(source.iter_full(), tmp_path / str(seed))
            ray.get(actor.observe.remote())
            trainer.send_weights()
            assert ray.get(actor.check.remote(str(sent))) == ""
