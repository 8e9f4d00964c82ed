"""Recording a vLLM model's loaders."""

from collections.abc import Sequence
from typing import Any

from torch import nn

import rdt_bake
from rdt_plan import ParamMeta
from rdt_vllm import _vllm
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.layerwise import to_meta
from rdt_vllm.ties import find_ties

__all__ = ["record_model"]


def record_model(
    model: nn.Module, params: Sequence[ParamMeta], vllm_config: _vllm.VllmConfig
) -> rdt_bake.Recording:
    """Where ``model.load_weights`` puts every slice of ``params``; the model is left as found.

    Raises:
        RdtBakeError: naming weight, operation and loader, or every parameter that no weight covers.
        UnsupportedError: the loaders refuse the weights, or consume none of them.
    """
    modules = dict(model.named_modules())
    load_weights: Any = model.load_weights

    def exempt(module: str, param: str) -> bool:
        return _vllm.is_never_loaded(modules[module], param)

    try:
        with _vllm.active_config(vllm_config), to_meta(model, find_ties(model)):
            recording = rdt_bake.record(model, load_weights, params, exempt=exempt)
    except rdt_bake.RdtBakeError:
        raise
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        raise UnsupportedError(
            f"{type(model).__name__} cannot load the {len(params)} weights that the trainer "
            f"publishes: {error}{f' ({notes})' if notes else ''}; do both hold the same model, "
            "under checkpoint names?"
        ) from error
    if not recording.consumed:
        raise UnsupportedError(
            f"{type(model).__name__} consumes none of the {len(params)} weights that the trainer "
            "publishes: publish this model's weights, under the names that its checkpoints have"
        )
    recording.require_coverage()
    return recording
