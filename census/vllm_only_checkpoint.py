"""Weights for architectures that transformers does not have.

The names are those of vLLM's own modules with its fusions undone: a ``qkv_proj`` becomes
``q_proj``, ``k_proj`` and ``v_proj``, stacked experts become ``experts.<i>.gate_proj`` and so on,
as the model's own tables say. `census.published_names` mends the rest; whether the loaders take
the result shows when they load it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from census.models import Models, vllm_config_of
from census.modes import Mode
from census.ranks import play_rank
from census.vllm_only_configs import FUSED, STACKED_EXPERTS, vllm_only_config

__all__ = ["unfused_weights"]

Shape = tuple[int, ...]
Kind = tuple[Shape, torch.dtype]

_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "wk_weights_proj": ["wk", "weights_proj"],
}


def unfused_weights(arch: str, folder: Path) -> dict[str, torch.Tensor]:
    """Zeros under the names of a checkpoint; writes ``config.json``. Once a process."""
    (folder / "config.json").write_text(json.dumps(vllm_only_config(arch), indent=1))
    config = vllm_config_of(folder, Mode())
    play_rank(config, Mode())
    model = Models(config).build()
    hf_config: Any = config.model_config.hf_text_config
    tied = getattr(hf_config, "tie_word_embeddings", False)
    kinds = _unmapped(model, _unfused(model, tied, arch in STACKED_EXPERTS, arch in FUSED))
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}


def _unfused(model: nn.Module, tied: bool, stacked: bool, keeps_fused: bool) -> dict[str, Kind]:
    fused = {} if keeps_fused else _fusions(model)
    kinds: dict[str, Kind] = {}
    for name, param in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        shape, dtype = tuple(param.shape), param.dtype
        vocabulary: Any = getattr(model.get_submodule(path), "org_vocab_size", None)
        if vocabulary is not None:
            shape = (vocabulary, *shape[1:])  # without its padding
        if tied and name == "lm_head.weight":
            continue
        if leaf in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
            config: Any = getattr(model.get_submodule(path), "moe_config", None)
            gated = getattr(config, "is_act_and_mul", True)
            kinds.update({n: (s, dtype) for n, s in _experts(path, leaf, shape, stacked, gated)})
            continue
        parent, _, local = path.rpartition(".")
        parts = fused.get(local, [])
        sizes = _sizes(model.get_submodule(path), shape, len(parts))
        if len(parts) == len(sizes) > 1 and sum(sizes) == shape[0]:
            for part, size in zip(parts, sizes, strict=True):
                kinds[f"{parent}.{part}.{leaf}"] = ((size, *shape[1:]), dtype)
        else:
            kinds[name] = (shape, dtype)
    return kinds


def _sizes(module: nn.Module, shape: Shape, count: int) -> list[int]:
    """How many rows each of a fused module's ``count`` parts has."""
    if count < 2:
        return []
    if isinstance(module, QKVParallelLinear):
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
        size = module.head_size
        return [heads * size, kv_heads * size, kv_heads * module.v_head_size]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_sizes)
    return [shape[0] // count] * count


def _fusions(model: nn.Module) -> dict[str, list[str]]:
    """The parts of each fused module, by its name, in their order."""
    table = dict(_FUSED)
    for module in model.modules():
        packed: Any = getattr(module, "packed_modules_mapping", None)
        table.update(packed or {})
        mapper: Any = getattr(module, "hf_to_vllm_mapper", None)
        stacked: dict[str, list[tuple[Any, str]]] = {}
        for part, (fused, shard) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
            stacked.setdefault(fused.strip("."), []).append((shard, part.strip(".")))
        for fused, parts in stacked.items():
            if "." not in fused and not any("." in part for _, part in parts):
                parts.sort(key=lambda each: _position(each[0]))
                table[fused] = [part for _, part in parts]
    return table


def _position(shard: Any) -> int:
    return shard if isinstance(shard, int) else {"q": 0, "k": 1, "v": 2}.get(shard, 9)


def _experts(
    path: str, leaf: str, shape: Shape, stacked: bool, gated: bool
) -> Iterator[tuple[str, Shape]]:
    """One tensor an expert and projection, or, stacked, one a projection."""
    base = path.removesuffix(".routed_experts")
    kind = "bias" if leaf.endswith("bias") else "weight"
    parts: tuple[str, ...]
    if leaf.startswith("w13") and not gated:
        parts, each = ("up_proj",), shape[1:]
    elif leaf.startswith("w13"):
        parts, each = ("gate_proj", "up_proj"), (shape[1] // 2, *shape[2:])
    else:
        parts, each = ("down_proj",), shape[1:]
    for part in parts:
        if stacked:
            yield f"{base.removesuffix('.experts')}.{part}.{kind}", (shape[0], *each)
        else:
            for expert in range(shape[0]):
                yield f"{base}.{expert}.{part}.{kind}", each


def _unmapped(model: nn.Module, kinds: dict[str, Kind]) -> dict[str, Kind]:
    """Under the prefixes that the model's own table maps to vLLM's."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    prefixes: dict[str, str] = getattr(mapper, "orig_to_new_prefix", None) or {}

    def spelled(name: str) -> str:
        for old, new in prefixes.items():
            if new and name.startswith(new) and not name.startswith(old):
                return old + name.removeprefix(new)
        return name

    return {spelled(name): kind for name, kind in kinds.items()}
