"""The tensors of one module, put aside and put back exactly."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleTensors", "own_tensors"]


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module itself, by attribute name; the None ones left out."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """What `of` saw in a module: its parameters, its buffers, and attributes they might hide.

    Kernels and captured graphs hold the addresses of these tensors, so they are never replaced,
    only written into.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter | None] = field(repr=False)
    buffers: dict[str, torch.Tensor | None] = field(repr=False)
    non_persistent: frozenset[str]
    attributes: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module, names: frozenset[str] = frozenset()) -> "ModuleTensors":
        """Remember the module's tensors, and those of its plain attributes called ``names``."""
        return cls(
            module=module,
            parameters=dict(module._parameters),
            buffers=dict(module._buffers),
            non_persistent=frozenset(module._non_persistent_buffers_set),
            attributes={name: module.__dict__[name] for name in names & module.__dict__.keys()},
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The remembered parameters and buffers by name, the None ones left out."""
        both = {**self.parameters, **self.buffers}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    def put_back(self) -> None:
        """Give the module its tensors back: same objects, containers and order."""
        module = self.module
        module._parameters.clear()
        module._parameters.update(self.parameters)
        module._buffers.clear()
        module._buffers.update(self.buffers)
        for name in (*self.parameters, *self.buffers):
            module.__dict__.pop(name, None)  # a plain attribute would hide it
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self.non_persistent)
        for name, value in self.attributes.items():
            module.__dict__[name] = value
