"""Buffers that show a parameter's memory otherwise shaped, as it was when the model was built.

vLLM's meta form of a model leaves them out. Where post-processing gives that parameter other memory
(a CPU's kernels pack), the buffer stays behind with the form that loaders fill, and is served.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from rdt_vllm import _vllm
from rdt_vllm.errors import UnsupportedError

__all__ = ["ViewBuffer", "find_view_buffers"]


@dataclass(frozen=True, slots=True)
class ViewBuffer:
    """One such buffer.

    Attributes:
        owner: the module that has it.
        name: its name there.
        buffer: itself; its address never changes.
        module: the module of the parameter that it shows.
        param: that parameter's name.
        is_shared: it still shares the parameter's memory, so it shows what that is given.
    """

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    module: nn.Module
    param: str
    is_shared: bool


def find_view_buffers(model: nn.Module, opened: Collection[str]) -> tuple[ViewBuffer, ...]:
    """All of ``model``'s, of which syncs open the modules at the paths ``opened``.

    Raises:
        UnsupportedError: it cannot be told which parameter one of them shows.
    """
    found = []
    for path, owner in model.named_modules():
        for name in _vllm.dropped_buffers(owner):
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.numel():
                view = _shown(path, owner, name, buffer, path in opened)
                found += [] if view is None else [view]
    return tuple(found)


def _shown(
    path: str, owner: nn.Module, name: str, buffer: torch.Tensor, is_opened: bool
) -> ViewBuffer | None:
    memory = buffer.untyped_storage().data_ptr()
    alike = []
    for module in owner.modules():
        for param, tensor in module._parameters.items():
            if tensor is not None and tensor.untyped_storage().data_ptr() == memory:
                return ViewBuffer(owner, name, buffer, module, param, True)
        for param, tensor in _vllm.checkpoint_form(module).items():
            if (tensor.numel(), tensor.dtype) == (buffer.numel(), buffer.dtype):
                alike.append((module, param))
    if not alike and not is_opened:
        return None  # made since, and left alone
    if len(alike) != 1 or not buffer.is_contiguous():
        raise UnsupportedError(
            f"{path}.{name} shows the memory of a parameter, or is made while serving, and it "
            f"cannot be told which: {len(alike)} parameters below {path!r} are of its size"
        )
    return ViewBuffer(owner, name, buffer, *alike[0], False)
