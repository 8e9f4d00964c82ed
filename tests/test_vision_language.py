"""A vision-language model, from the trainer through NIXL into the real installer: bit for bit.

vLLM starts no engine for one without its image processor, which needs packages that are not here.
So this process is the worker: vLLM's own loader builds the model, and vLLM's calls go straight to
the worker's weight transfer engine. Everything below that is what any worker runs.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 60.0
HIDDEN, PATCH, TEMPORAL = 64, 4, 2


class LoneWorker:
    """The weight routes of ``vllm.LLM``, for an engine with one worker that serves nothing."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.start_weight_update = engine.start_weight_update
        self.shutdown_weight_transfer_engine = engine.shutdown

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(request["init_info"]))

    def update_weights(self, request: Mapping[str, Any]) -> None:
        self._engine.update_weights(request["update_info"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()

    def sleep(self, level: int, mode: str) -> None:
        assert level == 0  # nothing moves

    def wake_up(self, tags: list[str]) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True


def tiny_model() -> Any:
    """A Qwen2.5-VL with two layers in either tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        tie_word_embeddings=False,
    )
    config.dtype = torch.bfloat16
    return Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).eval()


def seen(model: Any) -> torch.Tensor:
    """What the vision tower makes of a fixed image."""
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randn(64, 3 * TEMPORAL * PATCH**2, generator=drawn).to(torch.bfloat16)
    with torch.inference_mode():
        return model.visual(pixels, [[1, 8, 8]])


def said(model: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Logits of the language model's second feed-forward network for ``embedded``.

    Its attention would need the scheduler's batch.
    """
    language = model.language_model
    with torch.inference_mode():
        hidden = language.model.layers[1].mlp(language.model.norm(embedded))
        return language.compute_logits(hidden + language.model.embed_tokens(torch.arange(16)))


def sync_and_compare(folder: Path) -> None:
    """In a process of its own, since what stands in for the missing packages stays in it."""
    import nixl  # noqa: F401  (looks for CUDA's packages, of which a stand-in is made below)

    from census.startup import prepare_process

    prepare_process()
    from rdt_trainer import LocalClient, ModuleSource, RdtTrainer
    from rdt_trainer.transformers_names import transformers_names
    from rdt_transport.rendezvous import JobSettings
    from rdt_vllm._vllm import active_config, checkpoint_form
    from rdt_vllm.engine import RdtWeightTransferEngine
    from rdt_vllm.testing.bits import first_difference, flip_byte
    from rdt_vllm.testing.checkpoint import write_checkpoint, write_weights
    from rdt_vllm.testing.fresh_model import FreshModel
    from rdt_vllm.testing.module_snapshots import ModuleSnapshots
    from rdt_vllm.testing.single_worker import single_worker
    from rdt_vllm.testing.tensor_comparison import compare_filled, compare_live
    from rdt_vllm.testing.tiny_models import draw_weights

    trained = tiny_model()
    draw_weights(trained, 1)
    source = ModuleSource(trained, names=transformers_names(trained), persistent_buffers=True)
    served = write_checkpoint(trained, folder / "served")
    with single_worker(served) as config:
        device = torch.device("cpu")
        worker = FreshModel(config, device, str(served))
        worker.post_process()
        live, snapshots = worker.model, ModuleSnapshots()
        engine = RdtWeightTransferEngine(config.weight_transfer_config, config, device, live)
        engine.observe(snapshots.observe)
        trainer = RdtTrainer(
            source,
            LocalClient(LoneWorker(engine)),
            settings=JobSettings(num_producers=1, max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        outputs = []
        try:
            trainer.init()
            for seed in (11, 12):
                draw_weights(trained, seed)
                checkpoint = write_weights(source.iter_full(), folder / str(seed))
                snapshots.clear()
                trainer.send_weights()

                fresh = FreshModel(config, device, str(checkpoint))
                filled = compare_filled(fresh.model, live, snapshots, checkpoint_form)
                assert not filled.mismatches, filled.mismatches
                towers = {name.split(".")[0] for name, _ in fresh.model.named_parameters()}
                assert towers == {"visual", "language_model"}
                assert filled.bytes_compared == filled.bytes_expected > 0
                flipped = "visual.blocks.1.attn.proj.weight"
                flip_byte(fresh.model.get_parameter(flipped))
                wrong = compare_filled(fresh.model, live, snapshots, checkpoint_form).mismatches
                assert [each.path for each in wrong] == [flipped]

                fresh = FreshModel(config, device, str(checkpoint))
                fresh.post_process()
                assert not compare_live(fresh.model, live).mismatches
                with active_config(config):
                    image, expected = seen(live), seen(fresh.model)
                    assert image.isfinite().all() and image.shape == (16, HIDDEN)
                    assert first_difference(image, expected) is None
                    logits = said(live, image)
                    assert first_difference(logits, said(fresh.model, expected)) is None
                outputs.append((image, logits))
        finally:
            trainer.close()
        for first, second in zip(*outputs, strict=True):  # it did depend on the weights
            assert first_difference(first, second) is not None


def test_every_sync_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(sync_and_compare, tmp_path).result()
