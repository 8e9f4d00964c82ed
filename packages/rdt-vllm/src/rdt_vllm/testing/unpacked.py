"""Weights kept as they are loaded, as on a GPU: a CPU's kernels would pack them."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_weights_unpacked"]


def keep_weights_unpacked(replace: Callable[[str, object], None]) -> None:
    """Have models built from now on compute from unpacked weights.

    Experts then have no kernel that could run them. ``replace`` sets what a dotted name stands for,
    as pytest's ``monkeypatch.setattr`` does.
    """

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:  # a convolution's kernel reads its weight
            layer.cpu_linear = torch.nn.functional.linear

    def keep_experts(self: Any, layer: Any) -> None:
        self._use_zentorch = False

    layers = "vllm.model_executor.layers"
    replace(f"{layers}.utils.dispatch_cpu_unquantized_gemm", keep_weight)
    experts = f"{layers}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts"
    replace(f"{experts}.process_weights_after_loading", keep_experts)
