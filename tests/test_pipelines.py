"""Two pipeline stages of two expert-parallel trainer ranks, into a real vLLM of two workers."""

import secrets
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import LocalClient, ModuleSource
from rdt_transport.rendezvous import host_local
from rdt_transport.testing.object_process import ObjectProcess
from rdt_vllm.testing.checkpoint import WEIGHTS_FILE, write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import TINY_QWEN3_MOE, draw_weights
from tests.pipeline_ranks import NUM_RANKS, Rank, rank_of, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_stages_of_expert_parallel_ranks_are_exact(engines: EngineCache, tmp_path: Path) -> None:
    """Experts are owned by name, projections by rows or columns; no rank has the whole model."""
    model = TINY_QWEN3_MOE.build(seed=1)
    source = ModuleSource.of_transformers(model)
    folder = write_checkpoint(model, engines.folder / TINY_QWEN3_MOE.name)
    llm: Any = engines.get(folder, 2)
    first = write_weights(source.iter_full(), tmp_path / "first") / WEIGHTS_FILE
    with ExitStack() as stack:
        host = host_local("pipelines", secrets.token_hex(16), settings())
        stack.enter_context(closing(host))
        others = [
            stack.enter_context(ObjectProcess(rank_of, rank, first, host.address))
            for rank in range(1, NUM_RANKS)
        ]
        zero = Rank(0, first, host.address, LocalClient(llm))
        stack.callback(zero.trainer.close)
        for each in others:
            each.tell("init")
        zero.init()
        for each in others:
            each.answer()
        total = sum(tensor.nbytes for _, tensor in source.iter_full())
        assert zero.num_bytes < 0.6 * total
        digests = set()
        for seed in (71, 72, 73):
            draw_weights(model, seed)
            checkpoint = write_weights(source.iter_full(), tmp_path / str(seed))
            observe(llm)
            for each in others:
                each.tell("send", checkpoint / WEIGHTS_FILE)
            reports = [zero.send(checkpoint / WEIGHTS_FILE)]
            reports += [each.answer() for each in others]
            digests.add(check_exact(llm, checkpoint).require().logits_digest)
            assert [report.committed for report in reports] == [(0,)] * NUM_RANKS
            pulled = sum(worker["bytes_pulled"] for worker in llm.collective_rpc("rdt_traffic"))
            assert sum(r.bytes_direct + r.bytes_staged for r in reports) == pulled
            assert all(report.bytes_staged for report in reports)  # every rank serves something
        assert len(digests) == 3
        zero.trainer.close()
        assert [each.stop() for each in others] == [0] * len(others)
