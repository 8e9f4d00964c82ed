"""Configurations of architectures that transformers does not have."""

import copy
import json
from typing import Any

from census.configs import json_overrides, override, small_config
from census.drafts import DRAFTS, OWN_DRAFTS
from census.models import HOW
from census.vllm_only_dense import DENSE_CONFIGS
from census.vllm_only_moe import MOE_CONFIGS
from census.vllm_only_multimodal import MULTIMODAL_CONFIGS
from census.vllm_only_parts import BASE
from census.vllm_only_shared import SHARED_CONFIGS

__all__ = ["FUSED", "STACKED_EXPERTS", "VLLM_ONLY", "model_type", "vllm_only_config"]

_DERIVED = DRAFTS | OWN_DRAFTS | SHARED_CONFIGS

VLLM_ONLY: dict[str, dict[str, Any]] = {
    **DENSE_CONFIGS,
    **MOE_CONFIGS,
    **MULTIMODAL_CONFIGS,
    "ChatGLMForConditionalGeneration": DENSE_CONFIGS["ChatGLMModel"],
    **{arch: {} for arch in _DERIVED},
}

# Of these, a checkpoint holds one tensor a projection for all experts.
STACKED_EXPERTS = frozenset({"Step3TextForCausalLM"})

# Of these, a checkpoint holds fused projections as vLLM does.
FUSED = frozenset(
    {
        "DFlashLagunaForCausalLM",
        "GteNewModel",
        "GteNewForSequenceClassification",
        "ColBERTJinaRobertaModel",
    }
)


def model_type(arch: str) -> str:
    """What config.json calls it: a name of vLLM's own, or one that nobody else has."""
    kind = vllm_only_config(arch).get("model_type") if arch in _DERIVED else None
    return kind or VLLM_ONLY[arch].get("model_type", f"census_{arch.lower()}")


def vllm_only_config(arch: str) -> dict[str, Any]:
    """The small configuration of ``arch``, as its config.json holds it."""
    if arch not in _DERIVED:
        own = {"model_type": model_type(arch), "architectures": [arch]}
        return {**BASE, **VLLM_ONLY[arch], **own}
    base, values = _DERIVED[arch]
    values = dict(values)
    if base in VLLM_ONLY:
        config = copy.deepcopy(vllm_only_config(base))
    else:
        config = json.loads(small_config(base).to_json_string())
        override(config, json_overrides(base))
    if values.pop("@text", None):
        config = {"text_config": config, "model_type": f"census_{arch.lower()}"}
    own: dict[str, Any] = {"architectures": [arch]}
    if arch in DRAFTS:
        own = {"architectures": [base], HOW: "layers of a draft"}
    elif arch in OWN_DRAFTS:
        own[HOW] = "draft"
    override(config, {**values, **own})
    if arch == "EagleDeepSeekMTPModel":  # alone in keeping to vLLM's wrapper of a draft's
        inner = {**config, "architectures": ["DeepSeekMTPModel"]}
        return {**config, "model_type": "eagle", "model": inner}
    return config
