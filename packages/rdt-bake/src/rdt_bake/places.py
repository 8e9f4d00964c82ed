"""Where a model keeps tensors: parameters, buffers, and plain attributes of its modules.

A place is (dotted module path, attribute). Tensors inside a list, tuple or dict attribute are
reached one level deep and their attribute is spelled with the index: ``"caches[0]"``,
``"scales['k']"``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rdt_bake.errors import ReplayError

__all__ = ["Place", "find_tensor", "module_paths", "places"]

_OWN_DICTS = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Place:
    """One reachable tensor.

    Attributes:
        module: dotted path of the module; ``""`` is the root.
        param: the attribute, with an index for one inside a container.
        kind: ``"parameter"``, ``"buffer"`` or ``"attribute"``.
        container: the dict, list or tuple that holds it.
        key: its key or index there.
        tensor: the tensor.
    """

    module: str
    param: str
    kind: str
    container: Any
    key: Any
    tensor: torch.Tensor


def module_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All (path, module) pairs; a module shared by several paths comes once a path."""
    todo: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", model, ())]
    while todo:
        path, module, above = todo.pop()
        yield path, module
        inside = (*above, id(module))
        for name, child in reversed(module._modules.items()):
            if child is not None and id(child) not in inside:
                todo.append((f"{path}.{name}" if path else name, child, inside))


def places(model: nn.Module) -> list[Place]:
    """Every reachable tensor: parameters first, then buffers, then plain attributes."""
    found: dict[str, list[Place]] = {"parameter": [], "buffer": [], "attribute": []}
    for path, module in module_paths(model):
        for kind, own in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in own.items():
                if tensor is not None:
                    found[kind].append(Place(path, name, kind, own, name, tensor))
        for name, value in module.__dict__.items():
            if name in _OWN_DICTS:
                continue
            if isinstance(value, torch.Tensor):
                found["attribute"].append(
                    Place(path, name, "attribute", module.__dict__, name, value)
                )
            elif isinstance(value, (list, tuple, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, tensor in items:
                    if isinstance(tensor, torch.Tensor):
                        place = Place(path, f"{name}[{key!r}]", "attribute", value, key, tensor)
                        found["attribute"].append(place)
    return [place for kind in found.values() for place in kind]


def find_tensor(model: nn.Module, module: str, param: str) -> torch.Tensor:
    """The tensor that ``model`` keeps at a place; raises `ReplayError` when there is none."""
    try:
        owner = model.get_submodule(module)
    except AttributeError as error:
        raise ReplayError(f"the model has no module {module!r} (wanted its {param!r})") from error
    value = getattr(owner, param, None)
    if value is None and param.endswith("]"):
        name, _, index = param[:-1].partition("[")
        held = getattr(owner, name, None)
        if isinstance(held, dict):
            value = next((v for k, v in held.items() if repr(k) == index), None)
        elif isinstance(held, (list, tuple)) and index.isdigit() and int(index) < len(held):
            value = held[int(index)]
    if not isinstance(value, torch.Tensor):
        raise ReplayError(
            f"module {module!r} has no tensor {param!r}: found {type(value).__name__}; replay into "
            "a model built like the recorded one"
        )
    return value
