"""Building, loading and post-processing vLLM models in this process, on CPU."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from census.modes import Mode

__all__ = ["HOW", "Models", "Weights", "vllm_config_of"]

Weights = Mapping[str, torch.Tensor]

HOW = "census"
"""A key of config.json for what is no plain model: a ``"draft"``, the ``"layers of a draft"`` in
another model's checkpoint, or ``"transformers"``, vLLM's backend of that name."""


def vllm_config_of(folder: Path, mode: Mode) -> VllmConfig:
    """What vLLM makes of a checkpoint's folder, for one rank of ``mode``."""
    how = json.loads((folder / "config.json").read_text()).get(HOW)
    is_draft = how in ("draft", "layers of a draft")
    model_config = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        runner="draft" if is_draft else "auto",
        hf_overrides=SpeculativeConfig.hf_config_override if how == "layers of a draft" else {},
        model_impl="transformers" if how == "transformers" else "auto",
    )
    parallel_config = ParallelConfig(
        tensor_parallel_size=mode.size,
        enable_expert_parallel=mode.expert_parallel,
        distributed_executor_backend="mp" if mode.size > 1 else None,
    )
    assert mode.rank is not None
    parallel_config.rank = mode.rank

    def assemble(cache_config: CacheConfig) -> VllmConfig:
        vllm_config = VllmConfig(
            model_config=model_config,
            parallel_config=parallel_config,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format="safetensors"),
            compilation_config=CompilationConfig(mode=0),
        )
        if is_draft:
            vllm_config.speculative_config = _speculation(model_config, parallel_config)
        return vllm_config

    try:
        return assemble(CacheConfig())
    except ValueError as error:
        if "mamba-block-size" not in str(error):
            raise
        return assemble(CacheConfig(enable_prefix_caching=True))


def _speculation(model_config: ModelConfig, parallel_config: ParallelConfig) -> SpeculativeConfig:
    """What drafts read of it, where the draft is the model; its constructor asks for two."""
    config = object.__new__(SpeculativeConfig)
    values: dict[str, Any] = {
        field.name: field.default
        for field in fields(SpeculativeConfig)
        if field.default is not MISSING
    }
    values |= {
        "draft_model_config": model_config,
        "target_model_config": model_config,
        "draft_parallel_config": parallel_config,
        "num_speculative_tokens": 1,
    }
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


class Models:
    """Makes models of one configuration; each is a new one.

    Memory that nothing has written reads as NaN, or as the largest integer: a region that only one
    of two models has written shows as a difference. What a model draws at random itself is equal in
    all of them, so that a parameter that no checkpoint brings is not taken for a wrong one.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._dtype: Any = vllm_config.model_config.dtype  # vLLM has resolved names by now

    def build(self) -> nn.Module:
        """A model whose weights are not loaded."""
        compilation = self.vllm_config.compilation_config
        compilation.static_forward_context.clear()
        compilation.static_all_moe_layers.clear()
        make: Any = initialize_model
        with self.context(), _drawing_alike(), torch.device("cpu"):
            return make(vllm_config=self.vllm_config).eval()

    def loaded(self, weights: Weights) -> nn.Module:
        """A model that has loaded ``weights`` with its own loaders, as vLLM does it."""
        model: Any = self.build()
        with self.context(), _drawing_alike(), set_current_vllm_config(self.vllm_config):
            model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        return model

    def post_process(self, model: nn.Module) -> None:
        """Bring a loaded model into kernel form."""
        process: Any = process_weights_after_loading
        with self.context(), set_current_vllm_config(self.vllm_config):
            process(model, self.vllm_config.model_config, torch.device("cpu"))

    @contextmanager
    def context(self) -> Generator[None]:
        """What surrounds a load in vLLM, with fresh memory filled as said above."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with torch.no_grad(), set_default_torch_dtype(self._dtype):
                yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextmanager
def _drawing_alike() -> Generator[None]:
    """torch's random numbers start anew, and go on afterwards as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
