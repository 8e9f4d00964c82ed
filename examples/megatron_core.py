"""Megatron-Core: every rank serves its pipeline stage, tensor shard and experts as they lie.

Megatron holds fused what checkpoints hold apart. ``linear_qkv`` has, query group by query group,
the rows of its queries, of its key and of its value; ``linear_fc1`` has gate above up. `views`
names these parts, so nothing is gathered and nothing converted: gate, up, experts and all else are
served from the parameters' own memory, and of queries, keys and values the rows are brought
together, a copy of that one parameter. Layers are numbered as in the whole model, experts too.

Served are decoders that checkpoints name as those of Llama, Qwen3 and Qwen3-MoE, of Megatron's own
layers or of Transformer Engine's. The vocabulary must not be padded: choose
``make_vocab_size_divisible_by`` so that it is not.

    source = MegatronSource(unwrap_model(model))  # on every rank, once model parallelism is set up
    trainer = RdtTrainer(source, client if rank == 0 else None, rank=rank,
                         settings=JobSettings(num_producers=torch.distributed.get_world_size()))
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rdt_trainer import HeldPart, ModuleSource, NamedView, SourceMeta, merged_metadata

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
IN_A_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # fused by TE
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<a>\d+)\.)?linear_fc(?P<fc>[12])\.weight(?P<b>\d*)"
)
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


class Place(NamedTuple):
    """Where a rank is among those that cut a tensor."""

    index: int
    count: int


def views(model: GPTModel, first_expert: int, tensor_name: str) -> str | list[NamedView] | None:
    """The checkpoint names of one of this rank's parameters."""
    config = model.config
    if tensor_name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return None
    if (outside := OUTSIDE.get(tensor_name)) is not None:
        return outside
    index, _, rest = tensor_name.removeprefix("decoder.layers.").partition(".")
    prefix = f"model.layers.{model.decoder.layers[int(index)].layer_number - 1}."
    if (name := IN_A_LAYER.get(rest)) is not None:
        return prefix + name
    if (found := EXPERT.fullmatch(rest)) is not None:
        expert = f"{prefix}mlp.experts.{first_expert + int(found['a'] or found['b'])}."
        return f"{expert}down_proj.weight" if found["fc"] == "2" else gate_and_up(expert)
    if rest == "mlp.linear_fc1.weight":
        return gate_and_up(f"{prefix}mlp.")
    module, _, kind = rest.rpartition(".")
    if module != "self_attention.linear_qkv":
        raise ValueError(f"{tensor_name} has no checkpoint name here: expected a Llama-like layer")
    queries = config.num_attention_heads // config.num_query_groups
    rows = config.kv_channels

    def heads(first: int, last: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t.unflatten(0, (-1, queries + 2, rows))[:, first:last]

    ends = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    return [NamedView(f"{prefix}self_attn.{part}_proj.{kind}", heads(*ends[part])) for part in ends]


def gate_and_up(prefix: str) -> list[NamedView]:
    return [
        NamedView(f"{prefix}gate_proj.weight", lambda t: t.chunk(2)[0]),
        NamedView(f"{prefix}up_proj.weight", lambda t: t.chunk(2)[1]),
    ]


class MegatronSource:
    """A `rdt_trainer.LocalWeightSource` over one rank's ``GPTModel``."""

    def __init__(self, model: GPTModel) -> None:
        experts = model.config.num_moe_experts or 0
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
        self._local = ModuleSource(
            model,
            names=lambda name: views(model, first, name),
            dtype=model.config.params_dtype,
        )

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """The whole model, on every rank; a collective."""
        return merged_metadata(self._held())

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._local.iter_full():
            yield name, _merged(name, tensor)

    def stable_tensors(self) -> Mapping[str, Tensor]:
        return {n: _merged(n, tensor) for n, tensor in self._local.stable_tensors().items()}

    def _held(self) -> Iterator[HeldPart | SourceMeta]:
        tensors = Place(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        experts = Place(
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        for meta in self._local.metadata:
            module = meta.name.split(".")[-2]
            place = experts if ".experts." in meta.name else tensors
            shape = tuple(_merged(meta.name, torch.empty(meta.shape, device="meta")).shape)
            if module in ROWS or module in COLUMNS:
                dim = 0 if module in ROWS else 1
                yield HeldPart(meta.name, meta.dtype, shape, dim, *place)
            else:
                yield SourceMeta(meta.name, meta.dtype, shape)


def _merged(name: str, tensor: Tensor) -> Tensor:
    """Groups, heads and their rows are the rows of one matrix, or one bias."""
    return tensor.flatten(0, -2 if name.endswith("weight") else -1) if tensor.ndim > 2 else tensor
