"""Finding out which modules a sync may write where their kernels read: by trying it."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from rdt_vllm import _vllm
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.module_tensors import ModuleTensors, own_tensors
from rdt_vllm.reachable import ReachableState

__all__ = ["Probe"]

_PIECE = 1 << 24  # elements that are drawn, and compared, at a time
_FILLINGS = (1, 2)  # seeds


class Probe:
    """Tells which modules of a model, in kernel form, are what their checkpoint form is.

    Such a module is *live*: what a sync writes into the tensors that kernels use is what vLLM's
    post-processing would have made of it. That is tried on the module itself, which is given
    tensors of the checkpoint's form, filled at random, twice: after its post-processing every bit
    must be what it was, of these tensors and of all that the module's attributes lead to. The
    model is left as found. Modules of one class, with methods of one, with equal flags in both and
    equal layouts are tried once.

    No forward may run meanwhile. Takes a module's memory again, like a sync that is not live.

    Args:
        model: whose modules are asked for.
        vllm_config: post-processing may consult it.
    """

    def __init__(self, model: nn.Module, vllm_config: _vllm.VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._found: dict[object, str | None] = {}

    def obstacle(self, path: str, module: nn.Module) -> str | None:
        """Why the module at ``path`` is not live, in words; None when it is."""
        if _vllm.is_deferred(module):
            return "attention is processed after all others"
        different = _other_form(module)
        if different is not None:
            return f"post-processing gives {different} another form"
        method = _vllm.post_processor(module)
        if method is None:
            return None
        key = (type(module), type(method), _flags(module), _flags(method), _layouts(module))
        if key not in self._found:
            self._found[key] = self._tried(path, module)
        return self._found[key]

    def _tried(self, path: str, module: nn.Module) -> str | None:
        try:
            with self._left_as_found(module) as (state, others):
                for seed in _FILLINGS:
                    changed = self._change(path, module, seed) or state.changes()
                    changed = changed or _moved(self._model, others)
                    if changed is not None:
                        return f"post-processing changes {changed}"
        except Exception as error:
            return f"post-processing cannot be tried ({type(error).__name__}: {error})"
        return None

    @contextmanager
    def _left_as_found(
        self, module: nn.Module
    ) -> Generator[tuple[ReachableState, list[ModuleTensors]]]:
        state = ReachableState(module)
        every = [ModuleTensors.of(each) for each in self._model.modules()]
        others = [kept for kept in every if kept.module is not module]
        try:
            yield state, others
        finally:
            state.put_back()
            for kept in every:
                if not kept.is_in_place():
                    kept.put_back()

    def _change(self, path: str, module: nn.Module, seed: int) -> str | None:
        """Which of the module's own tensors its post-processing changes, filled from ``seed``."""
        unit = LayerwiseUnit(
            {path: module}, {path: frozenset(_vllm.checkpoint_form(module))}, ties=()
        )
        live = own_tensors(module)
        unit.open()
        try:
            filled: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
            for name, tensor in own_tensors(module).items():
                if tensor is live.get(name):  # vLLM never moves it
                    tensor = _twin(tensor)
                    holder = module._parameters if name in module._parameters else module._buffers
                    holder[name] = tensor  # type: ignore[assignment]
                filled[name] = tensor, _fill(tensor, live.get(name), seed)
            with torch.no_grad(), _vllm.active_config(self._vllm_config):
                _vllm.post_process(module)
            after = own_tensors(module)
            for name in {*filled, *after}:
                if name not in filled or name not in after:
                    return name
                before, values = filled[name]
                if not _is_filled(after[name], before, values, seed):
                    return name
            return None
        finally:
            unit.abandon()


def _other_form(module: nn.Module) -> str | None:
    """A tensor that kernels hold in another layout than loaders fill; None when there is none."""
    live, form = own_tensors(module), _vllm.checkpoint_form(module)
    for name, expected in form.items():
        tensor = live.get(name)
        if tensor is None or _layout(tensor) != _layout(expected):
            return name
    new = live.keys() - form.keys() - set(_vllm.dropped_buffers(module))
    return next((name for name in sorted(new) if not _vllm.is_never_moved(name)), None)


def _layouts(module: nn.Module) -> frozenset[object]:
    return frozenset((name, _layout(tensor)) for name, tensor in own_tensors(module).items())


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _flags(owner: Any) -> frozenset[object]:
    """What may make two of one class differ in how modules of one layout are processed."""
    return frozenset(
        (name, value if isinstance(value, (bool, Enum, type(None))) else type(value))
        for name, value in getattr(owner, "__dict__", {}).items()
    )


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach().clone(memory_format=torch.preserve_format)
    twin.__class__ = tensor.__class__
    twin.__dict__.update(tensor.__dict__)
    return twin


def _pieces(tensor: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Runs of the tensor's elements, each with the values that ``seed`` draws for it."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    pieces: tuple[torch.Tensor, ...] = (tensor.detach(),)
    if last + 1 == tensor.numel():  # it has no holes
        pieces = pieces[0].as_strided((tensor.numel(),), (1,)).split(_PIECE)
    for piece in pieces:
        values = torch.empty(piece.shape, dtype=torch.float32, device=tensor.device)
        yield piece, values.uniform_(-1, 1, generator=generator).to(tensor.dtype)


def _is_drawn(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _fill(tensor: torch.Tensor, live: torch.Tensor | None, seed: int) -> torch.Tensor | None:
    """Fill ``tensor``; returns a copy of what it holds where that was not drawn from ``seed``."""
    if _is_drawn(tensor):
        for piece, values in _pieces(tensor, seed):
            piece.copy_(values)
        return None
    if live is not None and live is not tensor:  # an index, a map: it must make sense
        tensor.copy_(live)
    return tensor.detach().clone()


def _is_filled(
    after: torch.Tensor, before: torch.Tensor, values: torch.Tensor | None, seed: int
) -> bool:
    if _layout(after) != _layout(before) or after.device != before.device:
        return False
    if values is not None:
        return torch.equal(after, values)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[after.itemsize]
    return all(
        torch.equal(piece.view(words), drawn.view(words)) for piece, drawn in _pieces(after, seed)
    )


def _moved(model: nn.Module, others: list[ModuleTensors]) -> str | None:
    moved = [kept.module for kept in others if not kept.is_in_place()]
    if not moved:
        return None
    paths = {module: path for path, module in model.named_modules()}
    return f"the tensors of {paths[moved[0]]}"
