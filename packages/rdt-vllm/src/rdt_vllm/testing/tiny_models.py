"""Tiny models whose weights are drawn on the spot from a seed; nothing is downloaded.

Every size divides by two, so each serves at a tensor parallel size of 1 or 2. *All* parameters are
drawn, norms and biases too: what a library initialises to ones is equal in every layer, and two
such tensors that were swapped would go unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

__all__ = [
    "TINY_DEEPSEEK_V2",
    "TINY_FALCON_H1",
    "TINY_GPT_OSS",
    "TINY_JAMBA",
    "TINY_LLAMA",
    "TINY_LLAMA_TIED",
    "TINY_MODELS",
    "TINY_QWEN2",
    "TINY_QWEN3",
    "TINY_QWEN3_MOE",
    "TINY_QWEN3_NEXT",
    "TINY_QWEN3_TIED",
    "TinyModel",
    "draw_weights",
]

_DENSE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A tiny architecture: a name that is unique here, and what its configuration says.

    Attributes:
        name: key in `TINY_MODELS`.
        model_type: the configuration class, as ``transformers`` names it.
        settings: fields of the configuration that differ from the shared tiny sizes.
        dtype: dtype of every parameter.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: torch.dtype = torch.bfloat16

    def config(self) -> PretrainedConfig:
        """A fresh configuration; the caller may change it."""
        config = AutoConfig.for_model(self.model_type, **{**_DENSE, **self.settings})
        config.dtype = self.dtype
        return config

    def build(self, seed: int) -> PreTrainedModel:
        """The model on the CPU, in evaluation mode; equal seeds give equal bits."""
        model = AutoModelForCausalLM.from_config(self.config(), dtype=self.dtype).eval()
        draw_weights(model, seed)
        return model


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter of ``model`` again, in place, in the order of its parameters.

    Vectors (norms) are drawn around one, biases around zero, matrices with the variance that
    keeps activations of order one. A CPU generator is used whatever the model's device is.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float32)
            if name.endswith("bias"):
                values.mul_(0.1)
            elif param.dim() == 1:
                values.mul_(0.1).add_(1.0)
            else:
                values.mul_(param.shape[-1] ** -0.5)
            param.copy_(values)


TINY_QWEN3 = TinyModel("qwen3", "qwen3", {"tie_word_embeddings": False})
TINY_QWEN3_TIED = TinyModel("qwen3-tied", "qwen3", {"tie_word_embeddings": True})
TINY_QWEN2 = TinyModel("qwen2", "qwen2", {"tie_word_embeddings": False})  # has q, k and v biases
TINY_LLAMA = TinyModel("llama", "llama", {"tie_word_embeddings": False})
TINY_LLAMA_TIED = TinyModel("llama-tied", "llama", {"tie_word_embeddings": True})
TINY_QWEN3_MOE = TinyModel(
    "qwen3-moe",
    "qwen3_moe",
    {
        "tie_word_embeddings": False,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
TINY_DEEPSEEK_V2 = TinyModel(  # latent attention, whose matrices are derived from kv_b_proj
    "deepseek-v2",
    "deepseek_v2",
    {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
)
TINY_JAMBA = TinyModel(  # Mamba beside attention; the loader computes A
    "jamba",
    "jamba",
    {
        "tie_word_embeddings": False,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
)
TINY_FALCON_H1 = TinyModel(  # Mamba 2 and attention in each layer; the loader computes A
    "falcon-h1",
    "falcon_h1",
    {
        "tie_word_embeddings": False,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
)
TINY_QWEN3_NEXT = TinyModel(  # linear attention beside full, experts beside a shared one
    "qwen3-next",
    "qwen3_next",
    {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
)
TINY_GPT_OSS = TinyModel(  # attention sinks, sliding windows, biases everywhere, fused experts
    "gpt-oss",
    "gpt_oss",
    {
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)

TINY_MODELS: Mapping[str, TinyModel] = MappingProxyType(
    {
        tiny.name: tiny
        for tiny in (
            TINY_QWEN3,
            TINY_QWEN3_TIED,
            TINY_QWEN2,
            TINY_LLAMA,
            TINY_LLAMA_TIED,
            TINY_QWEN3_MOE,
            TINY_DEEPSEEK_V2,
            TINY_JAMBA,
            TINY_FALCON_H1,
            TINY_QWEN3_NEXT,
            TINY_GPT_OSS,
        )
    }
)
