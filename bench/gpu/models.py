"""The models that are synced: published layer sizes, few layers, random weights."""

import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.gpu.devices import is_gpu

__all__ = ["MODELS", "GpuModel", "Shapes", "fill", "modules_of", "vllm_config_of"]

_COMMON = {
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class GpuModel:
    """A Qwen3 decoder; ``num_experts`` 0 is the dense one."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    num_layers: int
    num_experts: int = 0
    vocabulary: int = _COMMON["vocab_size"]

    def tiny(self) -> "GpuModel":
        """As many layers and experts, of small sizes."""
        return replace(
            self, hidden=256, intermediate=64, heads=8, kv_heads=4, head_dim=64, vocabulary=1024
        )

    def configuration(self) -> dict[str, Any]:
        """Its ``config.json``."""
        kind = "Qwen3Moe" if self.num_experts else "Qwen3"
        experts = {
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.num_experts,
            "num_experts_per_tok": min(8, self.num_experts),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return {
            **_COMMON,
            "architectures": [f"{kind}ForCausalLM"],
            "model_type": "qwen3_moe" if self.num_experts else "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            **(experts if self.num_experts else {}),
        }

    def shapes(self) -> Shapes:
        """Every checkpoint name and its shape, in the checkpoint's order; all bfloat16."""
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.num_layers):
            found |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in self._layer().items()
            }
        found["model.norm.weight"] = (self.hidden,)
        found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def _layer(self) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: Shapes = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "post_attention_layernorm": (self.hidden,),
        }
        prefixes = ["mlp"]
        if self.num_experts:
            layer["mlp.gate"] = (self.num_experts, self.hidden)
            prefixes = [f"mlp.experts.{expert}" for expert in range(self.num_experts)]
        for prefix in prefixes:
            layer[f"{prefix}.gate_proj"] = (self.intermediate, self.hidden)
            layer[f"{prefix}.up_proj"] = (self.intermediate, self.hidden)
            layer[f"{prefix}.down_proj"] = (self.hidden, self.intermediate)
        return layer


MODELS = {
    "dense": GpuModel(4096, 12288, 32, 8, 128, 12),  # Qwen3-8B's layers
    "moe": GpuModel(2048, 768, 32, 4, 128, 6, num_experts=128),  # Qwen3-30B-A3B's
    "rank": GpuModel(4096, 1536, 64, 4, 128, 3, num_experts=128),  # Qwen3-235B-A22B's, for TP=8
}


def modules_of(shapes: Shapes, device: str) -> nn.Module:
    """A tree of modules whose parameters have these names; uninitialised bfloat16."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for segment in path:
            if segment not in module._modules:
                module.add_module(segment, nn.Module())
            module = module.get_submodule(segment)
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def fill(tensor: torch.Tensor, name: str, version: int) -> torch.Tensor:
    """Random values that every process draws alike from the name and the version; in place."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(f"{version}/{name}".encode()))
    return tensor.uniform_(-1, 1, generator=generator)


def vllm_config_of(
    model: GpuModel, folder: Path, backend: str, device: str, rank: int = 0, size: int = 1
) -> Any:
    """vLLM's configuration of one worker of ``model``, whose file goes to ``folder``.

    ``rank``: of this worker among ``size`` tensor-parallel ones.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(model.configuration()))
    options: dict[str, Any] = {"attention_backend": "TRITON_ATTN"} if is_gpu(device) else {}
    if size > 1:
        options |= {"tensor_parallel_size": size, "disable_custom_all_reduce": True}
    config = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        enforce_eager=True,
        load_format="dummy",
        gpu_memory_utilization=0.3,
        **options,
    ).create_engine_config()
    config.weight_transfer_config = WeightTransferConfig(backend=backend)
    config.parallel_config.distributed_executor_backend = "ray"  # sharded_rdt's condition
    config.parallel_config.rank = rank
    return config
