"""Whether a model is what it was: the same objects in the same places, and the same bits."""

from typing import Any

import torch
from torch import nn

from rdt_bake.tensors import is_foreign
from rdt_vllm.testing.bits import to_bytes

__all__ = ["Portrait"]

_CONTAINERS = (dict, list, tuple, set)


class Portrait:
    """Everything a loader could reach in a model's modules, at one moment.

    Module attributes, parameters, buffers, children, hooks, and the attributes of tensors are
    compared by identity, containers by the identity of what they hold at any depth, and tensors
    also by their bits and layout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, list[Any]] = {}
        self._bits: dict[str, torch.Tensor] = {}
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            self._keep(path or "the model", vars(module))

    def changes(self) -> list[str]:
        """The names of what is not as it was."""
        now = Portrait(self._model)
        changed = {
            name
            for name in self._kept.keys() | now._kept.keys()
            if not _same(self._kept.get(name), now._kept.get(name))
        }
        for name in self._bits.keys() & now._bits.keys():
            if not torch.equal(self._bits[name], now._bits[name]):
                changed.add(f"{name} (values)")
        return sorted(changed)

    def _keep(self, name: str, held: Any) -> None:
        """Note what ``held`` is made of, and go on to what it holds."""
        if id(held) in self._seen:
            return
        if isinstance(held, torch.Tensor):
            self._seen.add(id(held))
            if not (held.is_meta or is_foreign(type(held))):
                self._bits[name] = to_bytes(held).clone()
            layout = [held.__class__, tuple(held.shape), held.stride(), held.dtype, held.device]
            self._kept[name] = [*layout, held.requires_grad, held.storage_offset()]
            self._keep(f"{name}.__dict__", held.__dict__)
        elif isinstance(held, _CONTAINERS):
            self._seen.add(id(held))
            if isinstance(held, dict):
                self._kept[name] = [*held.keys(), *held.values()]
                items = [(f"{name}.{key}", value) for key, value in held.items()]
            else:
                self._kept[name] = list(held)
                items = [(f"{name}[{i}]", value) for i, value in enumerate(held)]
            for inner, value in items:
                self._keep(inner, value)


def _same(before: list[Any] | None, now: list[Any] | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return False
    plain = (int, str, tuple, torch.device)
    return all(
        a is b or (isinstance(a, plain) and type(a) is type(b) and a == b)
        for a, b in zip(before, now, strict=True)
    )
