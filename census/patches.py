"""What a CPU-only vLLM needs to build every architecture. None of it touches a weight loader."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from vllm import triton_utils
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import torch_utils
from vllm.v1.attention.backends import cpu_attn

from census.quantised_patches import accept_quantised_kernels

__all__ = ["patch_vllm"]


def patch_vllm() -> None:
    """Apply all patches to this process; they cannot be undone."""
    _inspect_classes_here()
    _keep_weights_unpacked()
    _accept_kernels_that_a_cpu_lacks()
    accept_quantised_kernels()
    _do_without_cuda()


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _inspect_classes_here() -> None:
    """vLLM's way starts one python a class and writes a cache into the home folder."""

    def inspect_here(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    _set(registry._LazyRegisteredModel, "inspect_model_cls", inspect_here)


def _keep_weights_unpacked() -> None:
    """A GPU keeps unquantised weights as they are loaded; so does the census."""

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def keep_experts(self: Any, layer: Any) -> None:
        self._use_zentorch = False

    _set(layer_utils, "dispatch_cpu_unquantized_gemm", keep_weight)
    _set(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", keep_experts)


def _accept_kernels_that_a_cpu_lacks() -> None:
    """No kernel ever runs here; only which one is chosen changes."""
    choose: Any = vars(CpuPlatform)["get_attn_backend_cls"].__func__

    def choose_dense(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> Any:
        if attn_selector_config.use_sparse:
            attn_selector_config = attn_selector_config._replace(use_sparse=False)
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    _set(CpuPlatform, "get_attn_backend_cls", classmethod(choose_dense))

    make = cpu_attn.CPUAttentionBackendImpl.__init__
    known = inspect.signature(make).parameters

    def make_with_known(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{key: value for key, value in kwargs.items() if key in known})

    _set(cpu_attn.CPUAttentionBackendImpl, "__init__", make_with_known)
    _set(cpu_attn.CPUAttentionBackend, "supports_alibi_sqrt", classmethod(lambda cls: True))

    check: Any = moe_config.FusedMoEConfig.__dict__["__post_init__"]

    def check_all_but_activation(self: Any) -> None:
        try:
            check(self)
        except NotImplementedError as error:
            if "is_act_and_mul" not in str(error):
                raise

    _set(moe_config.FusedMoEConfig, "__post_init__", check_all_but_activation)
    _set(
        cpu_moe.CPUUnquantizedExperts,
        "is_supported_config",
        staticmethod(lambda *args, **kwargs: (True, None)),
    )


class _NoStream:
    """In place of a CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _without_pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _do_without_cuda() -> None:
    from torch.utils import _device

    _device._device_constructors()  # torch.device(...) remembers the functions as they are now
    for name in ("empty", "zeros"):
        _set(torch, name, _without_pinning(getattr(torch, name)))
    _set(torch.cuda, "Stream", _NoStream)
    _set(torch.cuda, "Event", _NoStream)
    triton: Any = triton_utils.triton
    for name, stand_in in {
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
        "set_allocator": lambda allocator: None,
    }.items():
        if not hasattr(triton, name):
            setattr(triton, name, stand_in)
    _set(torch_utils, "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
