"""Qwen3-235B-A22B as vLLM builds it for one of eight tensor-parallel ranks, without any weight.

Everything is on torch's meta device and in one process: the process group is torch's fake one,
whose collectives do nothing, and loading weights needs none.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rdt_plan import ParamMeta

__all__ = ["NUM_RANKS", "build_model", "weights"]

NUM_RANKS = 8
HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, INNER, VOCAB = 4096, 64, 4, 128, 128, 1536, 151936


def weights(num_layers: int) -> list[ParamMeta]:
    """The checkpoint's names, 393 a layer and three more, in its order."""

    def weight(name: str, *shape: int) -> ParamMeta:
        return ParamMeta(f"{name}.weight", "bfloat16", shape)

    found = [weight("model.embed_tokens", VOCAB, HIDDEN)]
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        found += [
            weight(f"{layer}.self_attn.q_proj", HEADS * HEAD, HIDDEN),
            weight(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            weight(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD, HIDDEN),
            weight(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD),
            weight(f"{layer}.self_attn.q_norm", HEAD),
            weight(f"{layer}.self_attn.k_norm", HEAD),
            weight(f"{layer}.mlp.gate", EXPERTS, HIDDEN),
            weight(f"{layer}.input_layernorm", HIDDEN),
            weight(f"{layer}.post_attention_layernorm", HIDDEN),
        ]
        for expert in range(EXPERTS):
            mlp = f"{layer}.mlp.experts.{expert}"
            found += [
                weight(f"{mlp}.gate_proj", INNER, HIDDEN),
                weight(f"{mlp}.up_proj", INNER, HIDDEN),
                weight(f"{mlp}.down_proj", HIDDEN, INNER),
            ]
    return [*found, weight("model.norm", HIDDEN), weight("lm_head", VOCAB, HIDDEN)]


def build_model(folder: Path, num_layers: int) -> tuple[nn.Module, Any]:
    """The model of rank 0 and its `VllmConfig`, whose file goes to ``folder``; once a process."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
    )
    from vllm.model_executor.model_loader import utils as loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    (folder / "config.json").write_text(json.dumps(_configuration(num_layers)))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=NUM_RANKS, distributed_executor_backend="mp"
        ),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="dummy"),
        compilation_config=CompilationConfig(mode=0),
    )
    _become_rank_zero(config)
    initialize_model: Any = loading.initialize_model  # a tracing decorator hides its signature
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        return initialize_model(vllm_config=config).eval(), config


def _configuration(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _become_rank_zero(config: Any) -> None:
    """This process as the first of `NUM_RANKS`, in groups of torch's fake backend."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    real_new_group: Any = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_new_group(ranks, **{**kwargs, "backend": "fake"})

    # vLLM asks for gloo groups and shared memory queues by name, and counts the nodes.
    queue: Any = shm_broadcast.MessageQueue
    communicator: Any = cpu_communicator.CpuCommunicator
    state: Any = parallel_state
    dist.new_group = new_group
    queue.create_from_process_group = staticmethod(lambda *_, **__: None)
    communicator._all_group_ranks_share_shm_group_name = lambda _: False
    state._node_count = lambda _: 1
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=NUM_RANKS, rank=0, local_rank=0, backend="fake"
        )
        parallel_state.initialize_model_parallel(NUM_RANKS, 1, backend="fake")
