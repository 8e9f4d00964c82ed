"""A fleet of published size, without weights: who of the trainer holds what, who reads what.

The model is a mixture of experts with multi-head latent attention (`PUBLISHED_SIZES`). 256 trainer
ranks hold it in 8 pipeline stages of 32, in one of two ways:

* **names**: 32 expert-parallel ranks a stage, each with its experts whole; everything else of the
  stage on all of them.
* **shards**: 8 expert-parallel ranks a stage, each of 4 that shard its experts (FSDP); everything
  else of the stage sharded over all 32. Everything lies still and registered, so that whatever is a
  run of bytes on both sides is read directly.

Workers read what vLLM's loaders take for tensor parallel size 8 (``tp``: a piece of every name) or
for 8 expert-parallel ranks whose attention is tensor-parallel (``ep``: an eighth of the experts,
whole).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.published_sizes import DeepseekV3, weights
from rdt_plan import ParamMeta, Placement, canonical, contiguous_stride, group_key

__all__ = ["NUM_RANKS", "NUM_WORKERS", "held_by_names", "held_in_shards", "writes_of"]

NUM_RANKS = 256
NUM_WORKERS = 8
NUM_STAGES = 8
STAGE = NUM_RANKS // NUM_STAGES
SHARDS = 4  # of an expert


def held_by_names(sizes: DeepseekV3) -> list[ParamMeta]:
    """Experts whole on one rank each, everything else on all ranks of its stage."""
    return [_held(param, sizes, STAGE, 1) for param in weights(sizes)]


def held_in_shards(sizes: DeepseekV3) -> list[ParamMeta]:
    """Experts sharded over 4 ranks, everything else over all ranks of its stage."""
    return [_held(param, sizes, STAGE // SHARDS, SHARDS) for param in weights(sizes)]


def _held(param: ParamMeta, sizes: DeepseekV3, expert_ranks: int, shards: int) -> ParamMeta:
    first = STAGE * _stage(param.name, sizes)
    expert = _expert(param.name)
    if expert is None:
        owners = tuple(range(first, first + STAGE))
    else:
        first += expert * expert_ranks // sizes.experts * shards
        owners = tuple(range(first, first + shards))
    if shards == 1:
        return replace(param, owners=owners)
    return replace(param, owners=owners, mesh_shape=(len(owners),), placements=("shard(0)",))


def _stage(name: str, sizes: DeepseekV3) -> int:
    key = group_key(name)
    if key is None:
        return 0 if "embed" in name else NUM_STAGES - 1
    return int(key.rsplit(".", 1)[1]) * NUM_STAGES // sizes.layers


def _expert(name: str) -> int | None:
    _, found, rest = name.partition(".experts.")
    return int(rest.split(".", 1)[0]) if found else None


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where a name lands: its module and tensor, after how many rows, and which part is read."""

    module: str
    param: str
    first_row: int = 0
    cut: int | None = None  # the dim of which a worker takes its piece


FUSED = {
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
ROWS = {"embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
COLUMNS = {"o_proj", "down_proj"}


def writes_of(
    params: Sequence[ParamMeta], sizes: DeepseekV3, worker: int, layout: str
) -> list[Placement]:
    """What the loaders of worker ``worker`` do, in the checkpoint's order."""
    return list(_writes(params, sizes, worker, layout))


def _writes(
    params: Sequence[ParamMeta], sizes: DeepseekV3, worker: int, layout: str
) -> Iterator[Placement]:
    local = sizes.experts // NUM_WORKERS
    for param in params:
        *path, kind, tensor = param.name.split(".")
        expert = _expert(param.name)
        cut = 0 if kind in ROWS else 1 if kind in COLUMNS else None
        if expert is not None and layout == "ep":
            if expert // local != worker:
                continue
            expert, cut = expert % local, None
        shape, at = list(param.shape), 0
        stride = contiguous_stride(shape)
        if cut is not None:
            shape[cut] //= NUM_WORKERS
            at = worker * shape[cut] * stride[cut]
        landed = contiguous_stride(shape)
        row = 0
        if kind == "up_proj" or kind == "kv_a_proj_with_mqa":
            row = shape[0] if kind == "up_proj" else sizes.q_rank
        if expert is None:
            module = ".".join([*path, FUSED.get(kind, kind)])
            offset = row * landed[0]
        else:
            module = ".".join(path[:-1])
            tensor = "w2_weight" if kind == "down_proj" else "w13_weight"
            rows = shape[0] * (1 if kind == "down_proj" else 2)
            offset = (expert * rows + row) * landed[0]
        yield Placement(
            slice=canonical(param.name, param.dtype, at, shape, stride),
            module=module,
            param=tensor,
            offset=offset,
            shape=tuple(shape),
            stride=landed,
            dtype=param.dtype,
            source_stride=landed,
        )
