"""Every architecture against what ``save_pretrained`` writes, bit for bit."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import ConversionOps, Interleave, Transpose, WeightConverter

from rdt_trainer.errors import SourceError
from rdt_trainer.module_source import ModuleSource
from rdt_trainer.transformers_names import transformers_names

# Whatever of these a configuration has, at any depth, is set.
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

# Served, and how many checkpoint names are parts of a tensor.
SERVED = {
    "deepseek_v2": (AutoModelForCausalLM, 12),
    "deepseek_v3": (AutoModelForCausalLM, 12),
    "ernie4_5_moe": (AutoModelForCausalLM, 12),
    "gemma3": (AutoModelForImageTextToText, 0),
    "gemma3_text": (AutoModelForCausalLM, 0),
    "glm4_moe": (AutoModelForCausalLM, 12),
    "glm4v_moe": (AutoModelForImageTextToText, 12),
    "gpt_neox": (AutoModelForCausalLM, 0),
    "gpt_oss": (AutoModelForCausalLM, 0),  # its checkpoints are fused as well
    "granitemoe": (AutoModelForCausalLM, 0),
    "jamba": (AutoModelForCausalLM, 12),
    "llama": (AutoModelForCausalLM, 0),
    "llava": (AutoModelForImageTextToText, 0),
    "minimax_m2": (AutoModelForCausalLM, 24),
    "mixtral": (AutoModelForCausalLM, 24),
    "olmoe": (AutoModelForCausalLM, 24),
    "phimoe": (AutoModelForCausalLM, 24),
    "qwen2_5_vl": (AutoModelForImageTextToText, 0),
    "qwen2_moe": (AutoModelForCausalLM, 24),
    "qwen2_vl": (AutoModelForImageTextToText, 0),
    "qwen3": (AutoModelForCausalLM, 0),
    "qwen3_5": (AutoModelForImageTextToText, 0),
    "qwen3_5_moe": (AutoModelForImageTextToText, 24),
    "qwen3_moe": (AutoModelForCausalLM, 24),
    "qwen3_next": (AutoModelForCausalLM, 24),
    "qwen3_vl": (AutoModelForImageTextToText, 0),
    "qwen3_vl_moe": (AutoModelForImageTextToText, 0),
}

# Refused, and why: the module holds apart what the checkpoint has as one.
REFUSED = {
    "gte": r"mlp\.up_gate_proj\.weight .* computes it from layers\.0\.mlp\.up_proj.* aten\.cat",
    "jina_embeddings_v3": r"mixer\.Wqkv\.bias .* layers\.0\.self_attn\.v_proj\.bias by aten\.cat",
    "nomic_bert": r"attn\.Wqkv\.weight .* layers\.0\.self_attn\.q_proj\.weight.* by aten\.cat",
    "radio": r"attn\.qkv\.bias .* encoder\.layer\.0\.attention\.q_proj\.bias.* by aten\.cat",
}


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    for name, value in TINY.items():
        if isinstance(getattr(config, name, None), type(value)) or name.endswith("token_id"):
            setattr(config, name, value)
    for listed in ("layer_types", "mlp_layer_types"):
        if kinds := vars(config).get(listed):
            setattr(config, listed, [kinds[0], kinds[-1]])
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            shrink(inner)
    return config


def build(model_type: str, factory: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    """A tiny model of which every element is drawn, buffers too."""
    config = shrink(AutoConfig.for_model(model_type))
    for name, value in settings.items():
        setattr(config, name, value)
    model = factory.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check(source: ModuleSource, written: dict[str, torch.Tensor]) -> None:
    yielded = list(source.iter_full())
    assert sorted(name for name, _ in yielded) == sorted(written)
    for meta, (name, tensor) in zip(source.metadata, yielded, strict=True):
        assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
        assert (tensor.dtype, tensor.shape) == (written[name].dtype, written[name].shape), name
        expected = written[name].reshape(-1).view(torch.uint8)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected), name


@pytest.mark.parametrize("model_type", SERVED)
def test_served_as_save_pretrained_writes_it(model_type, tmp_path):
    factory, num_parts = SERVED[model_type]
    model = build(model_type, factory)
    names = transformers_names(model)  # before anything is saved: it must not depend on that
    check(ModuleSource.of_transformers(model), saved(model, tmp_path))
    assert transformers_names(model) == names
    assert sum(len(part) for part in names.values() if isinstance(part, tuple)) == num_parts


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_the_reason(model_type):
    model = build(model_type, AutoModel)
    with pytest.raises(SourceError, match=rf"{REFUSED[model_type]}.*WeightSource of your own"):
        ModuleSource.of_transformers(model)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_vl", "mixtral", "gemma3"])
def test_a_loaded_model_is_served_as_it_is_written_again(model_type, tmp_path):
    factory = SERVED[model_type][0]
    written = saved(build(model_type, factory), tmp_path / "first")
    loaded = factory.from_pretrained(tmp_path / "first")
    check(ModuleSource.of_transformers(loaded), written)
    check(ModuleSource.of_transformers(loaded), saved(loaded, tmp_path / "again"))


def test_the_conversions_a_model_was_loaded_with_are_left_alone(tmp_path):
    saved(build("gpt_neox"), tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    (conversion,) = loaded._weight_conversions
    transformers_names(loaded)
    assert loaded._weight_conversions == [conversion]
    assert conversion._original_source_patterns == [r"^embed_out\."]


def test_what_the_model_never_writes_is_left_out(tmp_path):
    model = build("llama")
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    written = saved(model, tmp_path)
    assert "model.norm.weight" not in written
    check(ModuleSource.of_transformers(model), written)


def test_a_tied_tensor_has_the_name_that_is_written_and_others_on_request(tmp_path):
    model = build("qwen3_moe", tie_word_embeddings=True)
    written = saved(model, tmp_path)
    assert "lm_head.weight" not in written
    check(ModuleSource.of_transformers(model), written)
    extra = {"lm_head.weight": "model.embed_tokens.weight"}
    source = ModuleSource.of_transformers(model, extra_names=extra)
    check(source, {**written, "lm_head.weight": written["model.embed_tokens.weight"]})


def test_masters_are_cast(tmp_path):
    model = build("qwen3_moe").float()
    source = ModuleSource.of_transformers(model, dtype=torch.bfloat16)
    check(source, {n: t.bfloat16() for n, t in saved(model, tmp_path).items()})


@pytest.fixture
def one_rank(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_neox", "llava"])
def test_wrappers_change_nothing(model_type, tmp_path, one_rank):
    """Conversions are looked up by class and by place in the model, and wrappers change both."""
    factory = SERVED[model_type][0]
    written = saved(build(model_type, factory), tmp_path)
    model = build(model_type, factory)
    for name, inner in list(model.named_children()):
        setattr(model, name, torch.compile(inner))
    check(ModuleSource.of_transformers(torch.compile(model)), written)
    check(ModuleSource.of_transformers(nn.parallel.DistributedDataParallel(model)), written)
    sharded = build(model_type, factory)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(next(iter(sharded.children())), mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    check(ModuleSource.of_transformers(sharded), written)


class Changing(ConversionOps):
    """Its way back writes into the model's own tensor."""

    def convert(
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> dict[str, Any]:
        ((tensor,),) = input_dict.values()
        return {target_patterns[0]: self.apply(tensor)}

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Reading(Changing):
    """Its way back depends on values."""

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: int(tensor.sum())]


def converted(operation: ConversionOps) -> PreTrainedModel:
    model = build("llama")
    name = "self_attn.q_proj.weight"
    model.__dict__["_weight_conversions"] = [WeightConverter("self_attn.wq", name, [operation])]
    return model


def test_a_transposed_tensor_is_a_view(tmp_path):
    model = converted(Transpose(0, 1))
    source = ModuleSource.of_transformers(model)
    written = saved(model, tmp_path)
    assert "model.layers.1.self_attn.wq" in written
    check(source, written)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            Interleave(),
            r"layers\.0\.self_attn\.wq is no view.*q_proj\.weight by aten\._unsafe_view",
        ),
        (Changing(), r"layers\.0\.self_attn\.wq is no view.*q_proj\.weight by aten\.mul_"),
        (Reading(), r"conversion of .*q_proj\.weight.* to checkpoint names failed on meta tensors"),
    ],
)
def test_what_computes_is_refused(operation, message):
    with pytest.raises(SourceError, match=message):
        transformers_names(converted(operation))


def test_what_is_no_transformers_model_is_refused(monkeypatch):
    with pytest.raises(SourceError, match=r"Linear is no transformers PreTrainedModel"):
        transformers_names(nn.Linear(2, 2))
    model = build("llama")
    model.hf_quantizer = object()
    with pytest.raises(SourceError, match=r"quantised by object.*before it is quantised"):
        transformers_names(model)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(SourceError, match=r"expected transformers 5; install rdt-trainer\[transf"):
        transformers_names(model)
