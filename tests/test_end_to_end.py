"""Trainer, NIXL and a real vLLM: every sync held, bit for bit, against a fresh model's own load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_trainer import LocalClient, ModuleSource, RdtTrainer, SourceError
from rdt_transport.rendezvous import JobSettings
from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, observe
from rdt_vllm.testing.serving import EngineCache
from rdt_vllm.testing.tiny_models import TINY_MODELS, draw_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LAYOUTS = [("qwen3", 1), ("llama-tied", 1), ("qwen3-moe", 2), ("qwen2", 2), ("qwen3", 2)]
TIMEOUT_SECONDS = 60.0


class Run:
    """One trainer attached to one shared engine."""

    def __init__(self, engines: EngineCache, folder: Path, name: str, tp: int) -> None:
        self.model = TINY_MODELS[name].build(seed=1)
        self.folder = folder
        self.llm: Any = engines.get(write_checkpoint(self.model, _home(engines, name)), tp)
        self.source = ModuleSource.of_transformers(self.model)
        self.trainer = RdtTrainer(
            self.source,
            LocalClient(self.llm),
            # small chunks, so that layers are cut and slots are reused many times
            settings=JobSettings(num_producers=1, max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def draw(self, seed: int) -> Path:
        """New weights in the trainer; the checkpoint that says what they are."""
        draw_weights(self.model, seed)
        return write_weights(self.source.iter_full(), self.folder / str(seed))

    def traffic(self) -> list[dict[str, int]]:
        return self.llm.collective_rpc("rdt_traffic")


def _home(engines: EngineCache, name: str) -> Path:
    """Where the engines' initial checkpoint of that model lies: one folder, so one engine."""
    return engines.folder / name


@contextmanager
def run_of(engines: EngineCache, folder: Path, name: str, tp: int) -> Iterator[Run]:
    run = Run(engines, folder, name, tp)
    try:
        run.trainer.init()
        yield run
    finally:
        run.trainer.close()


@pytest.mark.parametrize(("name", "tp"), LAYOUTS)
def test_every_sync_is_exact(engines: EngineCache, tmp_path: Path, name: str, tp: int) -> None:
    with run_of(engines, tmp_path, name, tp) as run:
        digests = set()
        for seed in (11, 12, 13):
            checkpoint = run.draw(seed)
            observe(run.llm)
            run.trainer.send_weights()
            report = check_exact(run.llm, checkpoint).require()
            digests.add(report.logits_digest)
            assert len(report.workers) == tp
        assert len(digests) == 3
        assert not check_exact(run.llm, checkpoint, flip="model.norm.weight").ok


@pytest.mark.parametrize(("name", "tp"), [("qwen3", 2)])
def test_a_worker_pulls_its_share_only(
    engines: EngineCache, tmp_path: Path, name: str, tp: int
) -> None:
    with run_of(engines, tmp_path, name, tp) as run:
        run.draw(21)
        run.trainer.send_weights()
        sizes = {name: tensor.nbytes for name, tensor in run.source.iter_full()}
        replicated = sum(size for name, size in sizes.items() if name.endswith("norm.weight"))
        total = sum(sizes.values())
        share = (total - replicated) / tp + replicated
        for worker in run.traffic():
            assert share <= worker["bytes_pulled"] <= 1.02 * share
            assert worker["bytes_landed"] == share


def test_a_broken_source_fails_by_name_and_the_next_sync_heals(
    engines: EngineCache, tmp_path: Path
) -> None:
    with run_of(engines, tmp_path, "qwen3", 2) as run:
        run.draw(31)
        layer = run.model.model.layers[1].mlp
        whole = layer.down_proj.weight
        layer.down_proj.weight = torch.nn.Parameter(whole[:, :8].detach().clone())
        with pytest.raises(SourceError, match=r"layers\.1\.mlp\.down_proj\.weight"):
            run.trainer.send_weights()
        layer.down_proj.weight = whole
        checkpoint = run.draw(32)
        observe(run.llm)
        run.trainer.send_weights()
        check_exact(run.llm, checkpoint).require()


def test_a_second_trainer_takes_over_after_the_first_closed(
    engines: EngineCache, tmp_path: Path
) -> None:
    for seed in (41, 42):
        with run_of(engines, tmp_path / str(seed), "qwen3", 2) as run:
            checkpoint = run.draw(seed)
            observe(run.llm)
            run.trainer.send_weights()
            check_exact(run.llm, checkpoint).require()


def test_a_failing_call_does_not_shift_the_answers_of_later_ones(engines: EngineCache) -> None:
    """Stock vLLM answers the next call with the rest of the failed one's answers."""
    folder = write_checkpoint(TINY_MODELS["qwen3"].build(seed=1), engines.folder / "qwen3")
    llm: Any = engines.get(folder, 2)
    for _ in range(2):
        with pytest.raises(Exception, match="no_such_method"):
            llm.collective_rpc("no_such_method")
        answers = llm.collective_rpc("rdt_traffic")
        assert all({"bytes_pulled", "bytes_landed"} <= set(answer) for answer in answers)
        assert len(answers) == 2
