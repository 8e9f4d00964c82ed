"""What a module's post-processing can reach besides its own tensors, and whether it changed it."""

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rdt_vllm.errors import ProbeError

__all__ = ["ReachableState", "equal_bits"]

MAX_HOLDERS = 20_000
MAX_TENSOR_BYTES = 1 << 30

# Whose objects hold nothing that belongs to one module, and lead to everything else.
_ELSEWHERE = ("torch", "vllm.config", "vllm.distributed", "transformers", "logging", "threading")
_PLAIN = (str, bytes, int, float, complex, bool, types.NoneType, torch.dtype, torch.device)


class ReachableState:
    """Everything that a module's attributes lead to, as it was when this was made.

    Objects, containers and what functions close over are followed, other modules among them; the
    module's own parameters and buffers are not, unless something else leads to them as well.
    Tensors are copied.

    Raises:
        ProbeError: there is too much of it to be watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._holders: list[tuple[str, Any, Any]] = []  # a dict or a list, with a copy of it
        self._seen = {id(module), id(module._parameters), id(module._buffers)}
        self._left = MAX_TENSOR_BYTES
        self._holders.append(("", vars(module), dict(vars(module))))
        todo: list[tuple[str, Any]] = list(vars(module).items())
        while todo:
            path, value = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._keep(path, value)
            else:
                todo += self._inside(path, value)
            if len(self._holders) > MAX_HOLDERS:
                raise ProbeError(f"more than {MAX_HOLDERS} objects are within reach")

    def changes(self) -> str | None:
        """The path of something that is no longer what it was; None when nothing changed."""
        for path, holder, before in self._holders:
            if isinstance(holder, list):
                if not _same(before, holder):
                    return path
                continue
            for key in {*before, *holder}:
                if key not in before or key not in holder or not _same(before[key], holder[key]):
                    return f"{path}.{key}".lstrip(".")
        for path, tensor, copy in self._tensors.values():
            if not equal_bits(tensor, copy):
                return path
        return None

    def put_back(self) -> None:
        """Make all of it what it was: the same objects, with the same values."""
        for _, holder, before in self._holders:
            if isinstance(holder, list):
                holder[:] = before
            elif list(map(_identity, holder.items())) != list(map(_identity, before.items())):
                holder.clear()
                holder.update(before)
        for _, tensor, copy in self._tensors.values():
            if not equal_bits(tensor, copy):
                tensor.data.copy_(copy)

    def _keep(self, path: str, tensor: torch.Tensor) -> None:
        if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter):
            return
        self._left -= tensor.nbytes
        if self._left < 0:
            raise ProbeError(f"tensors of more than {MAX_TENSOR_BYTES} bytes are within reach")
        self._tensors[id(tensor)] = (path, tensor, tensor.detach().clone())

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What ``value`` leads to; it is remembered when it can be changed."""
        if isinstance(value, dict):
            self._holders.append((path, value, dict(value)))
            yield from ((f"{path}[{key!r}]", each) for key, each in value.items())
        elif isinstance(value, list):
            self._holders.append((path, value, list(value)))
            yield from ((f"{path}[{at}]", each) for at, each in enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            yield from ((path, each) for each in value)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                yield f"{path}()", cell.cell_contents
            yield from ((f"{path}()", each) for each in value.__defaults__ or ())
        elif isinstance(value, types.MethodType):
            yield path, value.__self__
        elif isinstance(value, functools.partial):
            yield from (
                (path, each) for each in (value.func, *value.args, *value.keywords.values())
            )
        elif not _is_elsewhere(value) and isinstance(getattr(value, "__dict__", None), dict):
            self._holders.append((path, vars(value), dict(vars(value))))
            yield from ((f"{path}.{key}", each) for key, each in vars(value).items())


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are alike in shape, strides, dtype and device, and in every bit."""
    if (left.shape, left.stride(), left.dtype, left.device) != (
        right.shape,
        right.stride(),
        right.dtype,
        right.device,
    ):
        return False
    both = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return left is right or torch.equal(*both)


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return equal_bits(before, after)
    if type(before) is not type(after):
        return False
    if isinstance(before, _PLAIN):
        return before == after
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, types.MethodType):
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    if isinstance(before, types.FunctionType):  # one that closes over nothing holds nothing
        return (
            before.__code__ is after.__code__
            and not (before.__closure__ or after.__closure__)
            and _same(before.__defaults__, after.__defaults__)
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_same(before[k], after[k]) for k in before)
    is_held = isinstance(before, nn.Module) or _is_elsewhere(before)
    state = None if is_held else getattr(before, "__dict__", None)
    return isinstance(state, dict) and _same(state, vars(after))  # a description, made anew


def _identity(item: tuple[Any, Any]) -> tuple[int, int]:
    return id(item[0]), id(item[1])


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return False
    if isinstance(value, (type, types.ModuleType)):
        return True
    return type(value).__module__.startswith(_ELSEWHERE)
