"""Quantised checkpoints, made from the names and shapes of unquantised ones.

Their values are drawn: that a sync is exact does not depend on what the bytes mean.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from census.quantised_schemes import SCHEMES, Scheme

__all__ = ["QUANTISED", "QUANTISED_CASES", "QUANTISED_SIZES", "equal_to", "quantise"]

Weights = Mapping[str, torch.Tensor]

_MXFP4_BLOCK = 32

QUANTISED: Mapping[str, str] = {name: scheme.title for name, scheme in SCHEMES.items()} | {
    "mxfp4": "packed fp4 with a scale a block of 32, in the experts alone, as GPT-OSS"
}
"""By variant, what it is."""

_DENSE = "LlamaForCausalLM Qwen2ForCausalLM"
_MOE = "Qwen3MoeForCausalLM DeepseekV3ForCausalLM"

QUANTISED_CASES: Mapping[str, str] = {
    "fp8block": f"{_DENSE} {_MOE} Phi3ForCausalLM MixtralForCausalLM",
    "fp8": f"{_DENSE} Phi3ForCausalLM Qwen3MoeForCausalLM MixtralForCausalLM",
    "ctfp8": f"{_DENSE} {_MOE}",
    "ctfp8dynamic": f"LlamaForCausalLM {_MOE}",
    "int8": f"{_DENSE} {_MOE}",
    "int8static": _DENSE,
    "w4a16": f"{_DENSE} {_MOE}",
    "w4a16zp": _DENSE,
    "w4a16kv": _DENSE,
    "awq": f"{_DENSE} {_MOE} MixtralForCausalLM",
    "awq16": _MOE,
    "gptq": f"{_DENSE} {_MOE} MixtralForCausalLM",
    "mxfp4": "GptOssForCausalLM",
}
"""By variant, the architectures that it is tried on."""

QUANTISED_SIZES: Mapping[str, int] = {
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
}
"""Sizes of the tiny models of which each of four shards is a multiple of a block or group."""

_LINEAR = re.compile(r"(_proj|_proj_with_mqa|experts\.\d+\.w[123])\.weight$")


def quantise(weights: Weights, variant: str, folder: Path) -> Weights:
    """Weights as a checkpoint of the quantised ``variant`` holds them; config.json says so too."""
    torch.manual_seed(0)
    if variant == "mxfp4":
        _declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": []})
        return _in_mxfp4(weights)
    scheme = SCHEMES[variant]
    quantised: dict[str, torch.Tensor] = {}
    plain = []
    for name, tensor in weights.items():
        if tensor.dim() == 2 and _LINEAR.search(name):
            prefix = name.removesuffix("weight")
            made = scheme.tensors(*tensor.shape)
            quantised.update((f"{prefix}{suffix}", value) for suffix, value in made.items())
            quantised.update(_cache_scales(scheme, prefix))
        else:
            quantised[name] = tensor
            if tensor.dim() == 2 and name.endswith(".weight"):
                plain.append(name.removesuffix(".weight"))
    ignored = {scheme.ignore_key: plain} if scheme.ignore_key else {}
    _declare(folder, {**scheme.config, **ignored})
    return quantised


def equal_to(name: str) -> str:
    """The tensor that holds the same value as ``name`` in every checkpoint, or ``name``.

    vLLM refuses experts of compressed-tensors whose two inputs are scaled unequally.
    """
    shared = re.sub(r"up_proj(\.input_scale)$", r"gate_proj\1", name)
    return re.sub(r"w3(\.input_scale)$", r"w1\1", shared)


def _cache_scales(scheme: Scheme, prefix: str) -> dict[str, torch.Tensor]:
    """The scales that follow an attention layer's last projection."""
    attention = re.fullmatch(r"(.*\.self_attn\.)o_proj\.", prefix)
    if attention is None:
        return {}
    return {f"{attention[1]}{name}": torch.rand(()).add(0.5) for name in scheme.cache_scales}


def _in_mxfp4(weights: Weights) -> Weights:
    """Fused experts: (experts, inputs, outputs) become rows of packed blocks, and their scales."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // _MXFP4_BLOCK)
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(0, 256, blocks, dtype=torch.uint8)
    return packed


def _declare(folder: Path, quantization_config: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization_config}
    path.write_text(json.dumps(config, indent=1))
