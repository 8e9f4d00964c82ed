"""Variants of an architecture, written ``Architecture@variant``."""

from typing import Any

from census.quantised_checkpoint import QUANTISED, QUANTISED_CASES, QUANTISED_SIZES

__all__ = ["VARIANTS", "VARIANT_CASES", "split_variant", "vary"]

VARIANTS = {
    "vocab250": "a vocabulary that is no multiple of 64, so that vLLM pads it",
    "tied": "tie_word_embeddings on",
    "untied": "tie_word_embeddings off",
    "fp32": "a float32 checkpoint for a bfloat16 model",
    "statedict": "names and layouts of the module's state_dict, not those of save_pretrained",
    **QUANTISED,
}

VARIANT_CASES = tuple(
    f"{arch}@{variant}"
    for variant, archs in {
        "vocab250": "LlamaForCausalLM GPT2LMHeadModel OPTForCausalLM Qwen3MoeForCausalLM"
        " DeepseekV3ForCausalLM Gemma3ForCausalLM OlmoeForCausalLM",
        "tied": "LlamaForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM MistralForCausalLM",
        "untied": "Gemma2ForCausalLM GraniteForCausalLM Qwen2ForCausalLM",
        "fp32": "LlamaForCausalLM Qwen3MoeForCausalLM DeepseekV3ForCausalLM Mamba2ForCausalLM",
        "statedict": "LlamaForCausalLM Qwen3ForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM"
        " MixtralForCausalLM DeepseekV3ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM"
        " OlmoeForCausalLM Gemma3ForConditionalGeneration Qwen3VLForConditionalGeneration"
        " Qwen3VLMoeForConditionalGeneration",
        **QUANTISED_CASES,
    }.items()
    for arch in archs.split()
)


def split_variant(name: str) -> tuple[str, str]:
    """(architecture, variant); the variant is ``""`` when there is none.

    Raises `ValueError` for an unknown one.
    """
    arch, _, variant = name.partition("@")
    if variant and variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}: expected one of {', '.join(VARIANTS)}")
    return arch, variant


def vary(config: dict[str, Any], variant: str) -> dict[str, Any]:
    """A copy with the variant's change of the configuration, in sub-configurations too."""
    varied = {
        key: vary(value, variant) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    if variant == "vocab250" and "vocab_size" in varied:
        varied["vocab_size"] = 250
    if variant in QUANTISED:
        varied |= {key: size for key, size in QUANTISED_SIZES.items() if varied.get(key)}
    if variant in ("tied", "untied"):
        varied["tie_word_embeddings"] = variant == "tied"
    return varied
