"""Quantised weights, from a trainer through NIXL into a real vLLM: bit for bit, again and again.

Each kind that `rdt_vllm.proven_methods` admits is tried here. What packs or converts weights after
loading does so at every sync, so the third sync counts for as much as the first.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from census.checkpoint import drawn
from census.quantised_checkpoint import quantise
from rdt_plan import group_ordered
from rdt_trainer import LocalClient, RdtTrainer
from rdt_trainer.source import SourceMeta
from rdt_transport.rendezvous import JobSettings
from rdt_vllm.testing.checkpoint import WEIGHTS_FILE, write_checkpoint, write_weights
from rdt_vllm.testing.report import check_exact, check_tensors, observe
from rdt_vllm.testing.serving import serving
from rdt_vllm.testing.tiny_models import TINY_QWEN2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 60.0

# Names that vLLM's loaders know and make nothing of.
UNCONSUMED = ("*.g_idx", "*.weight_shape")


class Quantised:
    """A source of quantised weights that are drawn anew for every sync."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        self._like = like
        self._names = group_ordered(list(like))
        self.draw(0)

    def draw(self, seed: int) -> None:
        self.weights = drawn(self._like, seed)

    @property
    def metadata(self) -> list[SourceMeta]:
        return [SourceMeta(n, self._like[n].dtype, tuple(self._like[n].shape)) for n in self._names]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.weights[name]) for name in self._names)


@pytest.mark.parametrize("variant", ["awq", "gptq", "int8", "w4a16", "w4a16zp", "w4a16kv"])
def test_every_sync_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: starts faster
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    folder = write_checkpoint(TINY_QWEN2.build(seed=1), tmp_path / "served")
    source = Quantised(dict(quantise(load_file(folder / WEIGHTS_FILE), variant, folder)))
    write_weights(source.iter_full(), folder)
    with serving(folder, distributed_executor_backend="uni") as llm:
        trainer = RdtTrainer(
            source,
            LocalClient(llm),
            settings=JobSettings(num_producers=1, max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
            unconsumed=UNCONSUMED,
        )
        try:
            trainer.init()
            for seed in (11, 12, 13):
                source.draw(seed)
                checkpoint = write_weights(source.iter_full(), tmp_path / str(seed))
                observe(llm)
                trainer.send_weights()
                check_exact(llm, checkpoint).require()
            flip = "model.layers.1.self_attn.qkv_proj.bias"
            (report,) = check_tensors(llm, checkpoint, flip=flip)
            assert flip in {each.path for each in report.mismatches}
        finally:
            trainer.close()
