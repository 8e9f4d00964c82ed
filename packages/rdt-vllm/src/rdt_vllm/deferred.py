"""Attention that derives tensors from other modules' weights, and so is processed once more."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rdt_vllm import _vllm
from rdt_vllm.errors import InstallError
from rdt_vllm.module_tensors import keeping_addresses

__all__ = ["DeferredModules"]

# What gives the same values whatever any weight holds.
_CONSTANT = frozenset(
    {
        "aten.detach.default",
        "aten.empty.memory_format",
        "aten.fill_.Scalar",
        "aten.full.default",
        "aten.lift_fresh.default",
        "aten.ones.default",
        "aten.zero_.default",
        "aten.zeros.default",
    }
)


class DeferredModules:
    """The modules of a model that every sync has to process after all others.

    vLLM processes attention last, because it may derive tensors from weights of other modules, as
    latent attention does. Most attention only resets its scales; that is found out by processing
    each once here, as after a first load, which changes no value.

    Args:
        model: in kernel form.
        written: dotted paths of the modules that a sync writes into.
        vllm_config: processing may consult it.
    """

    def __init__(
        self, model: nn.Module, written: Collection[str], vllm_config: _vllm.VllmConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if _vllm.is_deferred(module) and (path in written or not self._is_constant(module))
        }

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted paths of those that depend on weights."""
        return tuple(self._modules)

    def process(self) -> None:
        """Derive everything anew, into the tensors that kernels hold; current stream.

        Raises:
            InstallError: naming the attention that could not be processed.
        """
        if not self._modules:
            return
        with torch.no_grad(), _vllm.active_config(self._vllm_config):
            for path, module in self._modules.items():
                try:
                    self._process(path, module)
                except InstallError:
                    raise
                except Exception as error:
                    raise InstallError(f"{path}: post-processing failed: {error}") from error

    def _process(
        self, path: str, module: nn.Module, watch: AbstractContextManager[Any] | None = None
    ) -> None:
        holders: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        implementation = getattr(module, "impl", None)
        if hasattr(implementation, "__dict__"):
            holders.append(vars(implementation))
        with keeping_addresses(path, *holders), watch or nullcontext():
            _vllm.post_process_deferred(module, self._vllm_config)

    def _is_constant(self, module: nn.Module) -> bool:
        """Whether processing only writes constants; also False where it fails, as it then will."""
        operations = _Operations()
        try:
            with torch.no_grad(), _vllm.active_config(self._vllm_config):
                self._process("", module, operations)
        except Exception:
            return False
        return operations.seen <= _CONSTANT


class _Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))
