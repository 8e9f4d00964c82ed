"""What one of eight tensor-parallel ranks of a Qwen3 mixture holds, and where its loaders put it.

Fused as vLLM fuses: q, k and v are one tensor's rows, gate and up one expert's, o and down are cut
by columns, and norms and the router are whole.
"""

import math
from dataclasses import dataclass

from bench.gpu.models import GpuModel
from rdt_plan import Manifest, ParamMeta, Placement, canonical, contiguous_stride

__all__ = ["NUM_RANKS", "Spot", "manifest_of", "rank_shapes", "rank_writes"]

NUM_RANKS = 8

Shape = tuple[int, ...]
Spot = tuple[str, str]
"""(module, param)."""


@dataclass(frozen=True)
class _Part:
    """``shape`` of a source, from element ``first`` on, is put at element ``at`` of a tensor."""

    module: str
    first: int
    shape: Shape
    stride: Shape
    at: int


def manifest_of(model: GpuModel) -> Manifest:
    """What the trainer holds, whole."""
    return Manifest.build(
        ParamMeta(name, "bfloat16", shape) for name, shape in model.shapes().items()
    )


def rank_shapes(model: GpuModel) -> dict[Spot, Shape]:
    """The rank's tensors."""
    hidden, inner = model.hidden, model.intermediate // NUM_RANKS
    query, key = model.heads * model.head_dim // NUM_RANKS, model.head_dim
    layer: dict[str, Shape] = {
        "self_attn.qkv_proj": (query + 2 * key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.experts.w13": (model.num_experts, 2 * inner, hidden),
        "mlp.experts.w2": (model.num_experts, hidden, inner),
        "mlp.gate": (model.num_experts, hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (model.head_dim,),
        "self_attn.k_norm": (model.head_dim,),
    }
    rows = model.vocabulary // NUM_RANKS
    shapes: dict[str, Shape] = {
        "model.embed_tokens": (rows, hidden),
        "model.norm": (hidden,),
        "lm_head": (rows, hidden),
    }
    for number in range(model.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {(module, "weight"): shape for module, shape in shapes.items()}


def rank_writes(model: GpuModel, rank: int) -> list[Placement]:
    """What the rank's loaders do, in their order."""
    shapes = rank_shapes(model)
    writes = []
    for name, whole in model.shapes().items():
        part = _part(model, rank, name.removesuffix(".weight"), whole)
        target = shapes[part.module, "weight"]
        landed = contiguous_stride(target)[-len(part.shape) :]
        writes.append(
            Placement(
                slice=canonical(name, "bfloat16", part.first, part.shape, part.stride),
                module=part.module,
                param="weight",
                offset=part.at,
                shape=part.shape,
                stride=landed,
                dtype="bfloat16",
                source_stride=contiguous_stride(part.shape),
            )
        )
    return writes


def _part(model: GpuModel, rank: int, name: str, whole: Shape) -> _Part:
    layer, _, leaf = name.rpartition(".")
    query, key = model.heads * model.head_dim // NUM_RANKS, model.head_dim
    head = rank * model.kv_heads // NUM_RANKS  # fewer than ranks: each is held by several
    rows_before = {"q_proj": 0, "k_proj": query, "v_proj": query + key}
    if leaf in rows_before:
        count = query if leaf == "q_proj" else key
        first = rank * query if leaf == "q_proj" else head * key
        at = rows_before[leaf] * model.hidden
        return _rows(f"{layer}.qkv_proj", first, count, whole, at)
    if leaf == "o_proj":
        return _columns(name, rank, whole, 0)
    if ".experts." in name:
        experts, _, expert = layer.rpartition(".")
        inner = model.intermediate // NUM_RANKS
        if leaf == "down_proj":
            return _columns(f"{experts}.w2", rank, whole, int(expert) * model.hidden * inner)
        at = (2 * int(expert) + (leaf == "up_proj")) * inner * model.hidden
        return _rows(f"{experts}.w13", rank * inner, inner, whole, at)
    if name in ("model.embed_tokens", "lm_head"):
        count = whole[0] // NUM_RANKS
        return _rows(name, rank * count, count, whole, 0)
    return _Part(name, 0, whole, contiguous_stride(whole), 0)


def _rows(module: str, first: int, count: int, whole: Shape, at: int) -> _Part:
    columns = math.prod(whole[1:])
    return _Part(module, first * columns, (count, columns), (columns, 1), at)


def _columns(module: str, rank: int, whole: Shape, at: int) -> _Part:
    width = whole[1] // NUM_RANKS
    return _Part(module, rank * width, (whole[0], width), (whole[1], 1), at)
