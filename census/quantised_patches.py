"""What a CPU-only vLLM needs besides to build quantised models. No weight loader is touched.

No kernel ever runs here. Where this CPU has one for a quantisation, vLLM chooses it and its own
post-processing runs; where it has none, one that it lacks stands for it, whose post-processing
fails, and the model is recorded as it was loaded.
"""

from typing import Any

from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

__all__ = ["accept_quantised_kernels"]


def accept_quantised_kernels() -> None:
    """Let the last kernel that a CPU would choose stand for those that it lacks."""
    for kernel in (CPUWNA16LinearKernel, CPUFp8BlockScaledMMKernel):
        _always(kernel, "is_supported", "can_implement")
    for experts in (
        cpu_moe.CPUExpertsFp8,
        cpu_moe.CPUExpertsInt4,
        cpu_moe.CPUExpertsInt8,
        cpu_moe.CPUExpertsMxfp4,
    ):
        _always(experts, "is_supported_config")
    any_device: Any = classmethod(lambda cls: -1)
    AutoAWQConfig.get_min_capability = any_device


def _always(owner: Any, *names: str) -> None:
    for name in names:
        setattr(owner, name, staticmethod(lambda *args, **kwargs: (True, None)))
