"""Configurations of architectures that transformers does not have."""

from typing import Any

from census.vllm_only_dense import DENSE_CONFIGS
from census.vllm_only_moe import MOE_CONFIGS
from census.vllm_only_parts import BASE

__all__ = ["STACKED_EXPERTS", "VLLM_ONLY", "model_type", "vllm_only_config"]

VLLM_ONLY = {
    **DENSE_CONFIGS,
    **MOE_CONFIGS,
    "ChatGLMForConditionalGeneration": DENSE_CONFIGS["ChatGLMModel"],
}

# Of these, a checkpoint holds one tensor a projection for all experts.
STACKED_EXPERTS = frozenset({"Step3TextForCausalLM"})


def model_type(arch: str) -> str:
    """What config.json calls it: a name of vLLM's own, or one that nobody else has."""
    return VLLM_ONLY[arch].get("model_type", f"census_{arch.lower()}")


def vllm_only_config(arch: str) -> dict[str, Any]:
    """The small configuration of ``arch``, as its config.json holds it."""
    own = {"model_type": model_type(arch), "architectures": [arch]}
    return {**BASE, **VLLM_ONLY[arch], **own}
