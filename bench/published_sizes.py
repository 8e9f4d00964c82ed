"""Mixture-of-experts models at their published sizes: configurations and checkpoint names.

Names are those of an unquantised checkpoint, in its order; there are no weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rdt_plan import ParamMeta

__all__ = ["PUBLISHED_SIZES", "DeepseekV3", "PublishedSize", "Qwen3Moe", "weights"]

Weights = Iterator[ParamMeta]


@dataclass(frozen=True, slots=True)
class Qwen3Moe:
    """Grouped-query attention, and experts in every layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    inner: int
    vocab: int

    def configuration(self) -> dict[str, Any]:
        """What the checkpoint's ``config.json`` says."""
        return {
            **_shared_configuration(self),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * self.hidden,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "num_experts": self.experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def layer(self, number: int) -> Weights:
        """The names of one layer."""
        layer, hidden, kv = f"model.layers.{number}", self.hidden, self.kv_heads * self.head
        yield _weight(f"{layer}.self_attn.q_proj", self.heads * self.head, hidden)
        yield _weight(f"{layer}.self_attn.k_proj", kv, hidden)
        yield _weight(f"{layer}.self_attn.v_proj", kv, hidden)
        yield _weight(f"{layer}.self_attn.o_proj", hidden, self.heads * self.head)
        yield _weight(f"{layer}.self_attn.q_norm", self.head)
        yield _weight(f"{layer}.self_attn.k_norm", self.head)
        yield _weight(f"{layer}.mlp.gate", self.experts, hidden)
        yield _weight(f"{layer}.input_layernorm", hidden)
        yield _weight(f"{layer}.post_attention_layernorm", hidden)
        yield from _experts(f"{layer}.mlp", self.experts, hidden, self.inner)


@dataclass(frozen=True, slots=True)
class DeepseekV3:
    """Multi-head latent attention, a few dense layers, then experts of which one is shared."""

    layers: int
    hidden: int
    heads: int
    experts: int
    inner: int
    vocab: int
    dense_layers: int
    dense_inner: int
    expert_groups: int
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    head: int = 128

    def configuration(self) -> dict[str, Any]:
        """What the checkpoint's ``config.json`` says."""
        return {
            **_shared_configuration(self),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "intermediate_size": self.dense_inner,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.head,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "n_group": self.expert_groups,
            "topk_group": min(self.expert_groups, 4),
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }

    def layer(self, number: int) -> Weights:
        """The names of one layer."""
        layer, hidden = f"model.layers.{number}", self.hidden
        attention = f"{layer}.self_attn"
        yield _weight(f"{attention}.q_a_proj", self.q_rank, hidden)
        yield _weight(f"{attention}.q_a_layernorm", self.q_rank)
        yield _weight(f"{attention}.q_b_proj", self.heads * (self.nope + self.rope), self.q_rank)
        yield _weight(f"{attention}.kv_a_proj_with_mqa", self.kv_rank + self.rope, hidden)
        yield _weight(f"{attention}.kv_a_layernorm", self.kv_rank)
        yield _weight(f"{attention}.kv_b_proj", self.heads * (self.nope + self.head), self.kv_rank)
        yield _weight(f"{attention}.o_proj", hidden, self.heads * self.head)
        yield _weight(f"{layer}.input_layernorm", hidden)
        yield _weight(f"{layer}.post_attention_layernorm", hidden)
        mlp = f"{layer}.mlp"
        if number < self.dense_layers:
            yield from _gated(mlp, hidden, self.dense_inner)
            return
        yield _weight(f"{mlp}.gate", self.experts, hidden)
        yield ParamMeta(f"{mlp}.gate.e_score_correction_bias", "float32", (self.experts,))
        yield from _gated(f"{mlp}.shared_experts", hidden, self.inner)
        yield from _experts(mlp, self.experts, hidden, self.inner)


PublishedSize = Qwen3Moe | DeepseekV3

PUBLISHED_SIZES: Mapping[str, PublishedSize] = MappingProxyType(
    {
        "qwen3-235b": Qwen3Moe(94, 4096, 64, 4, 128, 128, 1536, 151936),
        "deepseek-v3": DeepseekV3(61, 7168, 128, 256, 2048, 129280, 3, 18432, 8),
        "kimi-k2": DeepseekV3(61, 7168, 64, 384, 2048, 163840, 1, 18432, 1),
    }
)


def weights(sizes: PublishedSize) -> list[ParamMeta]:
    """The checkpoint's names in its order."""
    return [
        _weight("model.embed_tokens", sizes.vocab, sizes.hidden),
        *(param for number in range(sizes.layers) for param in sizes.layer(number)),
        _weight("model.norm", sizes.hidden),
        _weight("lm_head", sizes.vocab, sizes.hidden),
    ]


def _shared_configuration(sizes: PublishedSize) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _weight(name: str, *shape: int) -> ParamMeta:
    return ParamMeta(f"{name}.weight", "bfloat16", shape)


def _gated(mlp: str, hidden: int, inner: int) -> Weights:
    yield _weight(f"{mlp}.gate_proj", inner, hidden)
    yield _weight(f"{mlp}.up_proj", inner, hidden)
    yield _weight(f"{mlp}.down_proj", hidden, inner)


def _experts(mlp: str, experts: int, hidden: int, inner: int) -> Weights:
    for expert in range(experts):
        yield from _gated(f"{mlp}.experts.{expert}", hidden, inner)
