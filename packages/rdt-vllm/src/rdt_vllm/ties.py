"""Tensors that several modules share, which layerwise installing must keep shared.

vLLM's meta form of a model forgets them: each module gets a meta tensor of its own.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rdt_vllm.module_tensors import own_tensors

__all__ = ["Tie", "find_ties", "retie"]

Tie = tuple[tuple[nn.Module, str], ...]
"""Places that hold one tensor, in the model's order; the first is where it is written."""


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The tensors that two or more (module, attribute) places of ``model`` share.

    The same object counts, and so do two objects over the same memory in the same layout. A module
    that is registered under two names is one module and ties nothing.
    """
    places: dict[object, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in own_tensors(module).items():
            places.setdefault(_key(tensor), []).append((module, name))
    return tuple(tuple(shared) for shared in places.values() if len(shared) > 1)


def _key(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0 or tensor.is_meta or isinstance(tensor, nn.UninitializedParameter):
        return id(tensor)  # no memory to share
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.untyped_storage().data_ptr(), *layout)


def retie(ties: Iterable[Sequence[tuple[nn.Module, str]]]) -> None:
    """Put the tensor of each tie's first place into its other places.

    Places whose module no longer has that attribute are left alone.
    """
    for (first, first_name), *others in ties:
        tensor = own_tensors(first).get(first_name)
        if tensor is None:
            continue
        for module, name in others:
            holder = module._parameters if name in module._parameters else module._buffers
            if name in holder:
                holder[name] = tensor  # type: ignore[assignment]
