"""Small configurations of the architectures that transformers has."""

import copy
from typing import Any

import transformers

from census.multimodal_overrides import MULTIMODAL_OVERRIDES
from census.sizes import shrunk
from census.text_overrides import TEXT_OVERRIDES
from census.variants import split_variant, vary

__all__ = ["BACKENDS", "json_overrides", "override", "small_config", "transformers_class"]

_OVERRIDES = TEXT_OVERRIDES | MULTIMODAL_OVERRIDES

# Architectures whose checkpoint is that of another class.
_SAME_CHECKPOINT = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "MuseGlimmerForCausalLM": "MuseGlimmerForConditionalGeneration",
    "DeepseekV3BidirectionalModel": "DeepseekV3ForCausalLM",
    "LlamaBidirectionalModel": "LlamaModel",
    "LlamaBidirectionalForSequenceClassification": "LlamaForSequenceClassification",
    "BgeM3EmbeddingModel": "XLMRobertaModel",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
    "Qwen3ASRRealtimeGeneration": "Qwen3ASRForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "JinaVLForRanking": "Qwen2VLForConditionalGeneration",
    "BertSpladeSparseEmbeddingModel": "BertForMaskedLM",
    "Glm5NextForCausalLM": "Glm5NextForConditionalGeneration",
}

# vLLM's backends for any model of transformers', by architecture: which one they are given.
BACKENDS = {
    "TransformersForCausalLM": "LlamaForCausalLM",
    "TransformersMoEForCausalLM": "Qwen3MoeForCausalLM",
    "TransformersMultiModalForCausalLM": "LlavaForConditionalGeneration",
    "TransformersMultiModalMoEForCausalLM": "Qwen3VLMoeForConditionalGeneration",
    "TransformersEmbeddingModel": "Qwen3Model",
    "TransformersMoEEmbeddingModel": "Qwen3MoeModel",
    "TransformersMultiModalEmbeddingModel": "Qwen2_5_VLModel",
    "TransformersForSequenceClassification": "RobertaForSequenceClassification",
    "TransformersMoEForSequenceClassification": "Qwen3MoeForSequenceClassification",
    "TransformersMultiModalForSequenceClassification": "Gemma3ForSequenceClassification",
}

# Keys of a configuration's dict that its class does not take back, or that mean nothing here.
_NOISE = frozenset(
    "architectures transformers_version id2label label2id torch_dtype dtype _name_or_path"
    " output_attentions output_hidden_states return_dict chunk_size_feed_forward"
    " problem_type".split()
)


def transformers_class(arch: str) -> Any:
    """The class whose checkpoints ``arch`` loads, or None."""
    arch = BACKENDS.get(arch, arch)
    return getattr(transformers, _SAME_CHECKPOINT.get(arch, arch), None)


def small_config(name: str) -> Any:
    """The configuration object of ``name``, which may carry a variant: defaults, made small."""
    arch, variant = split_variant(name)
    config_class = transformers_class(arch).config_class
    config = shrunk(_without_noise(config_class().to_dict()))
    override(config, {k: v for k, v in _entry(arch).items() if not k.startswith("json:")})
    config = vary(config, variant)
    config.pop("model_type", None)
    return config_class(**config)


def json_overrides(arch: str) -> dict[str, Any]:
    """What only config.json holds: dotted keys, as `override` takes them."""
    entry = _entry(arch)
    return {k.removeprefix("json:"): v for k, v in entry.items() if k.startswith("json:")}


def override(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Set keys of ``config``; dots reach into sub-configurations."""
    for dotted, value in values.items():
        *path, last = dotted.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = copy.deepcopy(value)


def _entry(arch: str) -> dict[str, Any]:
    arch = BACKENDS.get(arch, arch)
    entry = dict(_OVERRIDES.get(arch, _OVERRIDES.get(_SAME_CHECKPOINT.get(arch, ""), {})))
    text = entry.pop("@text", None)
    inner = {} if text is None else _OVERRIDES[text]
    return {f"text_config.{key}": value for key, value in inner.items()} | entry


def _without_noise(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_noise(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _NOISE
    }
