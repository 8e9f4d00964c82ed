"""Making transformers read the config.json of architectures that only vLLM has."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from census.vllm_only_configs import model_type

__all__ = ["register"]


# What vLLM asks of the class of a configuration: its name.
_CLASS_NAMES = {
    "GteNewModel": "NewConfig",
    "GteNewForSequenceClassification": "NewConfig",
    "ColBERTJinaRobertaModel": "XLMRobertaFlashConfig",
}


class _AnyConfig(PreTrainedConfig):
    """Takes any keys; sub-configurations become objects."""

    def __post_init__(self, **kwargs: Any) -> None:
        for key, value in kwargs.items():
            if key.endswith("_config") and isinstance(value, dict):
                kwargs[key] = _sub_config(**value)
        super().__post_init__(**kwargs)


def _sub_config(model_type: str | None = None, **values: Any) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(model_type or "", **values)
    except ValueError:
        return PreTrainedConfig(**values)


def register(arch: str) -> None:
    """Register the configuration class of ``arch``, unless its type is known; once a process."""
    kind = model_type(arch)
    try:
        AutoConfig.for_model(kind)
    except ValueError:
        if kind not in _CONFIG_REGISTRY:
            name = _CLASS_NAMES.get(arch, f"{arch}Config")
            config_class = type(name, (_AnyConfig,), {"model_type": kind})
            AutoConfig.register(kind, config_class)
