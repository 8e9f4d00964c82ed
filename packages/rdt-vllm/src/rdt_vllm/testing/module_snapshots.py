"""Copies of modules' tensors, taken while a sync fills them."""

import torch
from torch import nn

from rdt_vllm.module_tensors import own_tensors

__all__ = ["ModuleSnapshots"]


class ModuleSnapshots:
    """What each module held when it was shown: filled, and not yet post-processed.

    `observe` is the callback that an installer calls, on whichever thread post-processes.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        self._modules: set[str] = set()

    @property
    def num_modules(self) -> int:
        """How many modules have been shown since the last `clear`."""
        return len(self._modules)

    def clear(self) -> None:
        """Forget all of them, so that a module the next sync leaves out is missed."""
        self._tensors.clear()
        self._modules.clear()

    def observe(self, name: str, module: nn.Module) -> None:
        """Copy the tensors of ``module`` itself; a later call for ``name`` replaces the copies."""
        for param, tensor in own_tensors(module).items():
            self._tensors[name, param] = tensor.detach().clone()
        self._modules.add(name)

    def find(self, name: str, param: str) -> torch.Tensor | None:
        """The copy of one tensor, or None when its module was not shown, or had no such tensor."""
        return self._tensors.get((name, param))
