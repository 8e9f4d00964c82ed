"""Four FSDP2 ranks before two real vLLMs of different sizes: exact, by gather and by shards."""

from pathlib import Path
from typing import Any

import pytest

from rdt_trainer import LocalClient, ModuleSource
from rdt_trainer.testing.rank_processes import RankProcesses
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import draw_weights
from tests.fsdp_ranks import MODELS, NUM_RANKS, SOURCES, answered, rank_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_SYNCS = 5


@pytest.mark.parametrize("name", list(MODELS))
def test_every_sync_is_exact_on_both_replicas(
    engines: EngineCache, tmp_path: Path, name: str
) -> None:
    whole = MODELS[name].build(seed=1)
    folder = write_checkpoint(whole, engines.folder / name)
    llms: list[Any] = [engines.get(folder, 2), engines.get(folder, 1)]
    with (
        answered(LocalClient(llms[0])) as two,
        answered(LocalClient(llms[1])) as one,
        RankProcesses(rank_of, NUM_RANKS, tmp_path / "store", name, two, one) as ranks,
    ):
        sizes = ranks.ask("sizes")
        assert sizes[0] != sizes[-1]
        for kind in SOURCES:
            ranks.ask("start", kind)
            digests = set()
            for seed in range(NUM_SYNCS):
                for llm in llms:
                    observe(llm)
                assert ranks.ask("send", seed) == [(0, 1)] * NUM_RANKS
                draw_weights(whole, seed)
                weights = ModuleSource.of_transformers(whole).iter_full()
                checkpoint = write_weights(weights, tmp_path / kind / str(seed))
                reports = [check_exact(llm, checkpoint).require() for llm in llms]
                assert [len(report.workers) for report in reports] == [2, 1]
                digests.add(reports[0].logits_digest)
            assert len(digests) == NUM_SYNCS
            assert not check_exact(llms[0], checkpoint, flip="model.norm.weight").ok
            ranks.ask("stop")
