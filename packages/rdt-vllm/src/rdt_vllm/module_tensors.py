"""The tensors of one module, put aside and put back exactly, or kept where they are."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rdt_vllm.errors import InstallError

__all__ = ["ModuleTensors", "copy_all", "keeping_addresses", "layout", "own_tensors", "used_here"]

# Of which torch copies many tensors in one launch, on any device; of large ones it makes many.
_COPIED_TOGETHER = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int32}
)
_LARGE_BYTES = 4 << 20


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
        held = module.__dict__
        return cls(
            module=module,
            parameters=dict(module._parameters),
            buffers=dict(module._buffers),
            non_persistent=frozenset(module._non_persistent_buffers_set),
            attributes={name: held[name] for name in names if name in held},
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The remembered parameters and buffers by name, the None ones left out."""
        both = {**self.parameters, **self.buffers}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    def is_in_place(self) -> bool:
        """Whether the module has the very tensors that it had."""
        module = self.module
        return _identities(module._parameters) == _identities(self.parameters) and (
            _identities(module._buffers) == _identities(self.buffers)
        )

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


@contextmanager
def keeping_addresses(path: str, *holders: dict[str, Any]) -> Generator[None]:
    """Tensors that the body computes anew, in these dicts, are copied to where the old ones are.

    Kernels and captured graphs may have seen the old ones. When the body raises, or makes what does
    not fit, nothing is copied, and the dicts hold the old tensors again.

    Raises:
        InstallError: a tensor, which ``path`` helps to name, has another shape or dtype now.
    """
    before = [
        (holder, name, value)
        for holder in holders
        for name, value in holder.items()
        if isinstance(value, torch.Tensor)
    ]
    try:
        yield
        anew = [
            (holder, name, old, new)
            for holder, name, old in before
            if isinstance(new := holder.get(name), torch.Tensor) and new is not old
        ]
        for _, name, old, new in anew:
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise InstallError(
                    f"{path}.{name}: expected {layout(old)} from post-processing, found "
                    f"{layout(new)}; this layer cannot be updated in place"
                )
    except BaseException:
        for holder, name, old in before:
            holder[name] = old
        raise
    for holder, name, old, new in anew:
        old.data.copy_(new.data)
        holder[name] = old


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, of its shape and dtype; current stream, no autograd.

    On a GPU a launch takes longer than copying a small tensor, so those are copied together. What
    was made in inference mode can be written outside of it through ``.data`` only.
    """
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for target, source in pairs:
            if target.dtype in _COPIED_TOGETHER and target.nbytes < _LARGE_BYTES:
                targets, sources = together.setdefault(target.dtype, ([], []))
                targets.append(target.data)
                sources.append(source.data)
            else:
                target.data.copy_(source.data)
        for targets, sources in together.values():
            torch._foreach_copy_(targets, sources)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Their memory is not given away before what the current stream has enqueued by then is done.

    Of tensors that another thread's stream has allocated, a device's allocator does not know that.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def layout(tensor: torch.Tensor) -> str:
    """Shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _identities(tensors: Mapping[str, torch.Tensor | None]) -> list[tuple[str, int]]:
    return [(name, id(tensor)) for name, tensor in tensors.items()]
