"""Which quantised layers can be post-processed again: those whose syncs were tried, by class.

A class that is not listed here may keep what it computed from the first weights, or lose what it
would need for the next ones. `tests/test_quantised_engine.py` tries each that is.
"""

from typing import Any

import torch
from torch import nn

__all__ = ["addressed_tensors", "describe", "is_proven"]

# These, and what is derived from them, keep weights as they are or pack them anew.
_UNQUANTISED = frozenset(
    {"UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "UnquantizedLinearMethod"}
)

# (quantisation method, its scheme if it has one, its kernel if it has one).
_PROVEN = frozenset(
    {
        ("AutoAWQMarlinLinearMethod", None, "CPUWNA16LinearKernel"),
        ("AutoGPTQLinearMethod", None, "CPUWNA16LinearKernel"),
        # Attention: the scales of its cache, if the checkpoint has any.
        ("CompressedTensorsKVCacheMethod", None, None),
        (
            "CompressedTensorsLinearMethod",
            "CompressedTensorsW8A8Int8",
            "CPUInt8ScaledMMLinearKernel",
        ),
        ("CompressedTensorsLinearMethod", "CompressedTensorsWNA16", "CPUWNA16LinearKernel"),
    }
)


def is_proven(module: nn.Module, quant_method: Any) -> bool:
    """Whether ``quant_method`` has been shown to post-process such a module any number of times."""
    if any(kind.__name__ in _UNQUANTISED for kind in type(quant_method).__mro__):
        return True
    scheme, kernel = _parts(module, quant_method)
    found = (type(quant_method).__name__, _name(scheme), _name(kernel))
    return found in _PROVEN and not _is_other_form(module, kernel)


def _is_other_form(module: nn.Module, kernel: Any) -> bool:
    """Whether the classes are right, but what they make of the weights was not tried.

    That is what they make for AMX, and int8 with anything but a scale a channel for the weights,
    and none for the activations.
    """
    apply = getattr(getattr(kernel, "linear_method", None), "__name__", "")
    if getattr(module, "use_w4a8", False) or apply.endswith("_sgl"):
        return True
    config = getattr(kernel, "config", None)
    return (
        getattr(config, "is_static_input_scheme", False)
        or not getattr(config, "input_symmetric", True)
        or not getattr(config, "is_channelwise", True)
    )


def describe(module: nn.Module, quant_method: Any) -> str:
    """The classes that `is_proven` asks for, in words."""
    scheme, kernel = _parts(module, quant_method)
    words = [type(quant_method).__name__]
    words += [] if scheme is None else [f"with {_name(scheme)}"]
    words += [] if kernel is None else [f"on {_name(kernel)}"]
    return " ".join(words)


def addressed_tensors(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Tensors of a module just post-processed that its kernel remembers by address alone.

    oneDNN's handler of int8 weights goes on reading the scales where they were when it was made.
    """
    _, kernel = _parts(module, getattr(module, "quant_method", None))
    scale = getattr(module, "weight_scale", None) if hasattr(kernel, "dnnl_handler") else None
    return (scale,) if isinstance(scale, torch.Tensor) else ()


def _parts(module: nn.Module, quant_method: Any) -> tuple[Any, Any]:
    """The module's scheme and kernel, where there are such."""
    scheme = getattr(module, "scheme", None)
    holder = quant_method if scheme is None else scheme
    for name in ("kernel", "fp8_linear"):
        kernel = getattr(holder, name, None)
        if kernel is not None:
            return scheme, kernel
    return scheme, None


def _name(part: Any) -> str | None:
    return None if part is None else type(part).__name__
