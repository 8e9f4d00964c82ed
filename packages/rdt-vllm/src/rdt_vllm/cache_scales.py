"""Scales of an attention layer's key-value cache, which exist as parameters only while loading.

Post-processing moves them into buffers and takes the parameters away. Of those that a checkpoint
lacks, what the constructor gave them counts.
"""

from typing import Any

import torch
from torch import nn

from rdt_vllm import _vllm
from rdt_vllm.module_tensors import ModuleTensors

__all__ = ["unloaded_scales"]


def unloaded_scales(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that attention has before any weight is loaded, by name; nothing elsewhere.

    The module is left as found.
    """
    method: Any = _vllm.post_processor(module)
    if method is None or not _vllm.is_deferred(module):
        return {}
    form = _vllm.checkpoint_form(module)
    kept = ModuleTensors.of(module, frozenset(form))
    try:
        method.create_weights(module)
        return {  # the default dtype may be another than when the model was built
            name: param.data.to(form[name].dtype)
            for name, param in module._parameters.items()
            if name in form and param is not None and not param.is_meta
        }
    finally:
        kept.put_back()
