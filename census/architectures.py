"""Which architectures there are: vLLM's registry, and variants of some."""

from vllm.model_executor.models import registry

from census.checkpoint import can_be_built
from census.variants import VARIANT_CASES

__all__ = ["all_names", "why_not_attempted"]

_DRAFT = "a draft model that the census has no configuration of"
_BACKEND = "no architecture of its own"


def all_names() -> list[str]:
    """Every architecture of the registry, and every variant case, each once."""
    tables = (
        registry._TEXT_GENERATION_MODELS,
        registry._TRANSFORMERS_SUPPORTED_MODELS,
        registry._MULTIMODAL_MODELS,
        registry._EMBEDDING_MODELS,
        registry._LATE_INTERACTION_MODELS,
        registry._REWARD_MODELS,
        registry._TOKEN_CLASSIFICATION_MODELS,
        registry._SEQUENCE_CLASSIFICATION_MODELS,
        registry._SPECULATIVE_DECODING_MODELS,
        registry._TRANSFORMERS_BACKEND_MODELS,
    )
    return list(dict.fromkeys((*(arch for table in tables for arch in table), *VARIANT_CASES)))


def why_not_attempted(name: str) -> str | None:
    """The reason for which there is no checkpoint of ``name``, or None."""
    if can_be_built(name):
        return None
    if name in registry._SPECULATIVE_DECODING_MODELS:
        return _DRAFT
    if name in registry._TRANSFORMERS_BACKEND_MODELS:
        return _BACKEND
    return "transformers has no such class, and the census no configuration of its own"
