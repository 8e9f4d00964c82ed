"""Tiny models are what they say, equal for equal seeds, and survive a checkpoint bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rdt_vllm.testing.bits import first_difference
from rdt_vllm.testing.checkpoint import WEIGHTS_FILE, write_checkpoint, write_weights
from rdt_vllm.testing.tiny_models import TINY_MODELS, TINY_QWEN2, TINY_QWEN3_TIED, draw_weights


@pytest.mark.parametrize("name", TINY_MODELS)
def test_all_weights_are_drawn_from_the_seed(name: str) -> None:
    model, same, other = (TINY_MODELS[name].build(seed) for seed in (1, 1, 2))

    for path, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert param.unique().numel() > 1, path
        assert first_difference(param, same.get_parameter(path)) is None
        assert first_difference(param, other.get_parameter(path)) is not None

    draw_weights(model, 2)
    for path, param in model.named_parameters():
        assert first_difference(param, other.get_parameter(path)) is None


@pytest.mark.parametrize("name", TINY_MODELS)
def test_two_workers_can_share_it(name: str) -> None:
    config = TINY_MODELS[name].config().get_text_config()

    sizes = (config.vocab_size, config.num_attention_heads, config.num_key_value_heads)
    assert not any(size % 2 for size in (*sizes, config.intermediate_size))


def test_no_two_vectors_of_a_model_are_alike() -> None:
    vectors = [p for p in TINY_QWEN2.build(3).parameters() if p.dim() == 1]

    assert len({bytes(v.view(torch.uint8).tolist()) for v in vectors}) == len(vectors)


def test_a_checkpoint_has_the_config_and_every_bit(tmp_path: Path) -> None:
    model = TINY_QWEN2.build(4)

    folder = write_checkpoint(model, tmp_path / "checkpoint")

    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    stored = load_file(folder / WEIGHTS_FILE)
    assert stored.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert first_difference(stored[name], tensor) is None


def test_weights_replace_those_of_the_folder_and_ties_are_written(tmp_path: Path) -> None:
    model = TINY_QWEN3_TIED.build(5)
    folder = write_checkpoint(model, tmp_path / "checkpoint")
    draw_weights(model, 6)

    write_weights(model.state_dict().items(), folder)

    stored = load_file(folder / WEIGHTS_FILE)
    assert first_difference(stored["lm_head.weight"], model.lm_head.weight) is None
    assert first_difference(stored["model.embed_tokens.weight"], model.lm_head.weight) is None
    assert [file.name for file in folder.glob("*.safetensors")] == [WEIGHTS_FILE]
