"""What vLLM pads its experts with, and no weight brings.

A model may widen a shard of its experts that is too narrow for a kernel, and note both widths. The
rest is meant to be zero: some kernels need it so, and vLLM fills it with zeros before some of them.
Otherwise a load leaves there what the memory held. A sync fills it with zeros.
"""

from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

import rdt_bake
from rdt_plan import Fill, contiguous_stride

__all__ = ["with_expert_padding"]

_WEIGHTS = {"w13_weight": 1, "w2_weight": 2}  # and the dim that is padded


def with_expert_padding(recording: rdt_bake.Recording, model: nn.Module) -> rdt_bake.Recording:
    """The recording with fills of zero for experts of which exactly the declared padding is left.

    The fills are of whole tensors; copies come after them.
    """
    padded = [each for each in recording.uncovered if _is_padding(model, each)]
    fills = tuple(_fill(model, each) for each in padded)
    others = tuple(each for each in recording.uncovered if each not in padded)
    return replace(recording, writes=(*fills, *recording.writes), uncovered=others)


def _is_padding(model: nn.Module, lacking: rdt_bake.Uncovered) -> bool:
    """Whether all that is missing is the padding that the module itself declares."""
    config: Any = getattr(model.get_submodule(lacking.module), "moe_config", None)
    dim = _WEIGHTS.get(lacking.param)
    width = getattr(config, "intermediate_size_per_partition", None)
    loaded = getattr(config, "intermediate_size_per_partition_unpadded", None)
    if dim is None or width is None or loaded is None or len(lacking.shape) != 3:
        return False
    halves, rest = divmod(lacking.shape[dim], width)  # w13 may hold two projections
    others = prod(lacking.shape) // lacking.shape[dim]
    return (
        rest == 0
        and 0 < loaded < width
        and lacking.num_missing == halves * (width - loaded) * others
        and lacking.bounds[dim] == (loaded, halves * width)
    )


def _fill(model: nn.Module, lacking: rdt_bake.Uncovered) -> Fill:
    tensor = model.get_submodule(lacking.module).get_parameter(lacking.param)
    dtype = str(tensor.dtype).removeprefix("torch.")
    stride = contiguous_stride(lacking.shape)
    return Fill(lacking.module, lacking.param, 0, lacking.shape, tuple(stride), dtype, 0.0)
