"""A replica of two data-parallel ranks, with parallel experts, beside one of two tensor shards.

vLLM loads such a deployment on the CPU, and its forward crashes there: so what every parameter
holds is compared, and nothing is generated.
"""

import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import LocalClient, ModuleSource, RdtTrainer
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.object_process import ObjectProcess
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.engine_actor import EngineActor
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import TINY_QWEN3_MOE, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_RANKS = 2
TIMEOUT_SECONDS = 120.0


@contextmanager
def engine_of(folder: Path, rank: int, port: int) -> Generator[EngineActor]:
    """One data-parallel rank, in a process of its own: its engine is in that process, too."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(NUM_RANKS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
    )
    actor = EngineActor(folder, distributed_executor_backend="uni", enable_expert_parallel=True)
    try:
        yield actor
    finally:
        actor.stop()


class Ranks:
    """A `Client` of one deployment whose data-parallel ranks are processes."""

    name = "data-parallel ranks"
    num_workers = NUM_RANKS

    def __init__(self, ranks: Sequence[ObjectProcess]) -> None:
        self._ranks = ranks

    def all(self, method: str, *arguments: object) -> list[Any]:
        for rank in self._ranks:
            rank.tell(method, *arguments)
        return [rank.answer() for rank in self._ranks]

    def init(self, init_info: Mapping[str, Any]) -> None:
        self.all("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start(self) -> None:
        self.all("start_weight_update")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self.all("update_weights", {"update_info": dict(update_info)})

    def finish(self, weight_version: str | None = None) -> None:
        self.all("finish_weight_update", weight_version)

    def shutdown(self) -> None:
        self.all("shutdown_weight_transfer_engine")

    def pause(self, mode: str = "abort") -> None: ...

    def resume(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def deployment(engines: EngineCache) -> Generator[Callable[[Path], Ranks]]:
    """Starts one for a folder; ended with the test."""
    with ExitStack() as stack:

        def start(folder: Path) -> Ranks:
            port = free_port()
            return Ranks(
                [
                    stack.enter_context(ObjectProcess(engine_of, folder, rank, port))
                    for rank in range(NUM_RANKS)
                ]
            )

        yield start


def test_expert_parallel_ranks_are_exact_beside_tensor_shards(
    engines: EngineCache, tmp_path: Path, deployment: Callable[[Path], Ranks]
) -> None:
    """It joins between two syncs; each of its workers reads its own experts only."""
    model = TINY_QWEN3_MOE.build(seed=1)
    source = ModuleSource.of_transformers(model)
    folder = write_checkpoint(model, engines.folder / TINY_QWEN3_MOE.name)
    llm: Any = engines.get(folder, 2)
    ranks = deployment(folder)
    settings = JobSettings(num_producers=1, max_chunk_bytes=16 << 10)
    with RdtTrainer(
        source, LocalClient(llm), settings=settings, timeout_seconds=TIMEOUT_SECONDS
    ) as trainer:
        trainer.init()
        assert trainer.add_replica(ranks) == 1
        assert ranks.all("consumers") == [["r1w0"], ["r1w1"]]
        for seed in (81, 82, 83):
            draw_weights(model, seed)
            checkpoint = write_weights(source.iter_full(), tmp_path / str(seed))
            observe(llm)
            ranks.all("observe")
            assert trainer.send_weights().committed == (0, 1)
            check_exact(llm, checkpoint).require()
            for (report,) in ranks.all("check_tensors", checkpoint):
                assert report.ok, report.mismatches
        for (report,) in ranks.all("check_tensors", checkpoint, "model.norm.weight"):
            assert not report.ok
        sizes = {name: tensor.nbytes for name, tensor in source.iter_full()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        for (traffic,) in ranks.all("traffic"):
            assert traffic["bytes_landed"] == sum(sizes.values()) - experts // 2
