"""The form in which loaders fill a module, made anew for every sync.

vLLM is asked once what that is: its own functions go through the module name by name each time,
which takes as long as moving a small module's bytes.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from rdt_vllm import _vllm
from rdt_vllm.module_tensors import ModuleTensors

__all__ = ["CheckpointForm"]


class CheckpointForm:
    """What vLLM's reload would make of one module that is in kernel form: empty, but not on meta.

    Right for as long as `is_of` says so.

    Args:
        module: in kernel form; left as found.
        stays: its tensors that are the kernels' in either form.
    """

    def __init__(self, module: nn.Module, stays: Collection[str]) -> None:
        self._hidden = frozenset(_vllm.checkpoint_form(module))
        kept = self.keep(module)
        self._names = _names(module)
        _vllm.restore_on_meta(module)
        try:
            made = kept.tensors().keys() & set(stays)
            self._parameters = _empties(module, module._parameters.items(), made)
            self._buffers = _empties(module, module._buffers.items(), made)
            self._non_persistent = frozenset(module._non_persistent_buffers_set)
        finally:
            kept.put_back()

    def keep(self, module: nn.Module) -> ModuleTensors:
        """Remember what `give` will replace."""
        return ModuleTensors.of(module, self._hidden)

    def is_of(self, module: nn.Module) -> bool:
        """Whether the module, in kernel form, has tensors of the names that it had then."""
        return _names(module) == self._names

    def give(self, kept: ModuleTensors) -> None:
        """Put uninitialised tensors in place of the kernels', which ``kept`` holds."""
        module = kept.module
        parameters: Any = module._parameters
        buffers: Any = module._buffers
        parameters.clear()
        buffers.clear()
        for holder, empties in ((parameters, self._parameters), (buffers, self._buffers)):
            for name, empty in empties:
                if empty is not None:
                    holder[name] = empty.made()
                elif name in kept.parameters:
                    holder[name] = kept.parameters[name]
                else:
                    holder[name] = kept.buffers[name]
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self._non_persistent)
        for name in kept.attributes:
            del module.__dict__[name]


class _Empty(NamedTuple):
    """How one tensor is made."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: type[torch.Tensor]
    attributes: dict[str, Any]

    def made(self) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        tensor.__class__ = self.kind
        tensor.__dict__ = self.attributes.copy()
        return tensor


_Empties = list[tuple[str, _Empty | None]]
"""By name, in order; None: the module keeps what it has."""


def _empties(
    module: nn.Module, items: Iterable[tuple[str, Any]], stays: Collection[str]
) -> _Empties:
    device = _vllm.build_device(module)
    found: _Empties = []
    for name, tensor in items:
        if tensor is None or name in stays or _vllm.is_never_moved(name) or not tensor.is_meta:
            found.append((name, None))
            continue
        attributes = tensor.__dict__.copy()
        empty = _Empty(
            tensor.shape, tensor.stride(), tensor.dtype, device, type(tensor), attributes
        )
        found.append((name, empty))
    return found


def _names(module: nn.Module) -> tuple[object, ...]:
    """Of its tensors, of its placeholders for some, and of what its state leaves out."""
    parameters, buffers = module._parameters, module._buffers
    missing = [each is None for each in (*parameters.values(), *buffers.values())]
    return [*parameters], [*buffers], missing, set(module._non_persistent_buffers_set)
