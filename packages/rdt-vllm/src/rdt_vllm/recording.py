"""Recording a vLLM model's loaders."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import nn

import rdt_bake
from rdt_plan import ParamMeta
from rdt_vllm import _vllm
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.expert_padding import with_expert_padding
from rdt_vllm.layerwise import to_meta
from rdt_vllm.ties import find_ties

__all__ = ["record_model"]

_logger = logging.getLogger("rdt_vllm")


def record_model(
    model: nn.Module,
    params: Sequence[ParamMeta],
    vllm_config: _vllm.VllmConfig,
    unconsumed: Sequence[str] = (),
) -> rdt_bake.Recording:
    """Where ``model.load_weights`` puts every slice of ``params``; the model is left as found.

    Loaders skip a name that they do not know, or fail. Where they fail, they are asked again
    without the names that match a pattern of ``unconsumed`` (as a shell's): nobody needs to read
    those. Not at once, as what they do know they should get.

    A parameter that no weight covers is an error, unless the checkpoint that vLLM itself loaded
    covers none of it either: it keeps the value that it has, and that is logged.

    Raises:
        RdtBakeError: naming weight, operation and loader, or every parameter that no weight covers.
        UnsupportedError: the loaders refuse the weights, or consume none of them.
    """
    recording = _record_needed(model, params, vllm_config, unconsumed)
    if not recording.consumed:
        raise UnsupportedError(
            f"{type(model).__name__} consumes none of the {len(params)} weights that the trainer "
            "publishes: publish this model's weights, under the names that its checkpoints have"
        )
    recording = with_expert_padding(recording, model)
    if not recording.uncovered:
        return recording
    unloaded = _unloaded(model, vllm_config)
    lacking = tuple(each for each in recording.uncovered if each not in unloaded)
    replace(recording, uncovered=lacking).require_coverage()
    _logger.warning(
        "%d parameters keep the values that they have: neither the trainer nor the checkpoint "
        "that this worker was started from has weights for them: %s",
        len(recording.uncovered),
        "; ".join(map(str, recording.uncovered)),
    )
    return recording


def _record_needed(
    model: nn.Module,
    params: Sequence[ParamMeta],
    vllm_config: _vllm.VllmConfig,
    unconsumed: Sequence[str],
) -> rdt_bake.Recording:
    try:
        return _record(model, params, vllm_config)
    except (UnsupportedError, rdt_bake.RdtBakeError) as error:
        needed = [
            param
            for param in params
            if not any(fnmatchcase(param.name, pattern) for pattern in unconsumed)
        ]
        if not needed or len(needed) == len(params):
            raise
        recording = _record(model, needed, vllm_config)
        withheld = len(params) - len(needed)
        _logger.info("%d names that need no reader are left out, as: %s", withheld, error)
        return recording


def _unloaded(model: nn.Module, vllm_config: _vllm.VllmConfig) -> frozenset[rdt_bake.Uncovered]:
    """The parameters that the worker's own checkpoint leaves wholly as their constructors did."""
    try:
        weights = _vllm.checkpoint_weights(vllm_config, model)
        if weights is None:
            return frozenset()
        params = {
            name: ParamMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in weights
        }
        recording = _record(model, tuple(params.values()), vllm_config)
    except Exception as error:  # then nothing excuses what the trainer lacks
        _logger.warning("cannot tell what this worker's own checkpoint covers: %s", error)
        return frozenset()
    return frozenset(each for each in recording.uncovered if each.num_missing == prod(each.shape))


def _record(
    model: nn.Module, params: Sequence[ParamMeta], vllm_config: _vllm.VllmConfig
) -> rdt_bake.Recording:
    modules = dict(model.named_modules())
    load_weights: Any = model.load_weights

    def exempt(module: str, param: str) -> bool:
        return _vllm.is_never_loaded(modules[module], param)

    try:
        with _vllm.active_config(vllm_config), to_meta(model, find_ties(model)):
            return rdt_bake.record(model, load_weights, params, exempt=exempt)
    except rdt_bake.RdtBakeError:
        raise
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        raise UnsupportedError(
            f"{type(model).__name__} cannot load the {len(params)} weights that the trainer "
            f"publishes: {error}{f' ({notes})' if notes else ''}; do both hold the same model, "
            "under checkpoint names?"
        ) from error
