"""One unit of layerwise installing: modules that leave kernel form together and come back together.

A unit is one module, or several that share a tensor.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from rdt_bake import find_tensor
from rdt_vllm import _vllm
from rdt_vllm.cache_scales import unloaded_scales
from rdt_vllm.checkpoint_form import CheckpointForm
from rdt_vllm.errors import InstallError, UnsupportedError
from rdt_vllm.module_tensors import ModuleTensors, keeping_addresses, layout, own_tensors
from rdt_vllm.proven_methods import addressed_tensors
from rdt_vllm.ties import Tie, retie
from rdt_vllm.view_buffers import ViewBuffer

__all__ = ["LayerwiseUnit", "to_meta"]


class LayerwiseUnit:
    """Modules between checkpoint form and kernel form. Not thread-safe.

    `open` gives the modules empty memory in checkpoint form, and the caller fills it through
    `destination`. `processed` says what is to be copied into the kernels' tensors, `close` puts
    those back. `abandon` puts them back as they are.

    Attributes:
        is_live: False; see `rdt_vllm.live.LiveUnit`.

    Args:
        modules: by dotted path, in the model's order.
        written: attribute names, by dotted path, that a sync writes.
        ties: the tensors that they share with each other.
        views: buffers of theirs, or of other modules, that show parameters.

    Raises:
        UnsupportedError: a tensor is neither written nor kept by post-processing.
    """

    is_live = False

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        written: Mapping[str, frozenset[str]],
        ties: Sequence[Tie],
        views: Sequence[ViewBuffer] = (),
    ) -> None:
        self.modules = dict(modules)
        self._ties = tuple(ties)
        self._kept: list[ModuleTensors] = []
        self._addressed: dict[str, tuple[torch.Tensor, ...]] = {}  # kept alive
        tied = {(id(module), name) for tie in ties for module, name in tie}
        self._forms: dict[str, CheckpointForm] = {}
        self._stays: dict[str, frozenset[str]] = {}
        self._drawn: dict[str, tuple[str, ...]] = {}
        self._unloaded: dict[str, dict[str, torch.Tensor]] = {}
        self._shows: dict[str, frozenset[str]] = {}
        self._shown: dict[str, tuple[ViewBuffer, ...]] = {}
        for path, module in self.modules.items():
            live, form = own_tensors(module), _vllm.checkpoint_form(module)
            names = tuple(
                name
                for name in form
                if name not in written.get(path, ()) and (id(module), name) not in tied
            )
            self._unloaded[path] = unloaded_scales(module)
            for name in names:
                if name.removeprefix("_") in self._unloaded[path]:
                    continue  # a scale of a cache, or the buffer that it is moved into
                if form[name].numel() and not _alike(live.get(name), form[name]):
                    raise UnsupportedError(
                        f"{path}.{name} is loaded from no weight, and post-processing changes its "
                        "shape or dtype, so its value before that is lost"
                    )
            stays = frozenset(name for name in names if _alike(live.get(name), form[name]))
            self._stays[path], self._forms[path] = stays, CheckpointForm(module, stays)
            self._drawn[path] = tuple(name for name in names if name in self._unloaded[path])
            self._shows[path] = frozenset(v.name for v in views if v.owner is module)
            self._shown[path] = tuple(v for v in views if v.module is module and not v.is_shared)

    @property
    def is_open(self) -> bool:
        """True between `open` and `close` or `abandon`."""
        return bool(self._kept)

    def open(self) -> None:
        """Put the kernels' tensors aside and give the modules uninitialised ones to fill.

        Tensors that no sync writes keep their values.
        """
        for path, module in self.modules.items():
            form = self._forms[path]
            if not form.is_of(module):
                form = self._forms[path] = CheckpointForm(module, self._stays[path])
            kept = form.keep(module)
            self._kept.append(kept)
            form.give(kept)
            for name in self._drawn[path]:
                module.get_parameter(name).data.copy_(self._unloaded[path][name])
        retie(self._ties)

    def destination(self, path: str, name: str) -> torch.Tensor:
        """The tensor to write into: of checkpoint form, or one that never leaves kernel form."""
        module = self.modules[path]
        found = module._parameters.get(name)  # nearly always, and asked for often
        return find_tensor(module, "", name) if found is None else found

    def given(self) -> list[torch.Tensor]:
        """What the modules hold now: while open, what was filled."""
        return [each for module in self.modules.values() for each in own_tensors(module).values()]

    def processed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Post-process every module; gives the kernels' tensors, each with what goes into it.

        Raises `InstallError` naming the tensor when post-processing yields another shape or dtype
        than the kernels hold. The unit is still open.
        """
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (path, module), kept in zip(self.modules.items(), self._kept, strict=True):
            for view in self._shown[path]:
                view.buffer.copy_(getattr(module, view.param).view(view.buffer.shape))
            if _vllm.post_processor(module) is not None:
                with keeping_addresses(path, vars(module)):
                    _vllm.post_process(module)
                self._addressed[path] = addressed_tensors(module)
            with torch._C.DisableTorchFunctionSubclass():  # which vLLM's parameters only pass on
                results += self._results(path, module, kept)
        return results

    def _results(
        self, path: str, module: nn.Module, kept: ModuleTensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, kernel in kept.tensors().items():
            value = getattr(module, name, None)
            if value is kernel or (value is None and name in self._shows[path]):
                continue
            if not isinstance(value, torch.Tensor) or not _alike(value, kernel):
                found = layout(value) if isinstance(value, torch.Tensor) else "none"
                raise InstallError(
                    f"{path}.{name}: expected {layout(kernel)} from post-processing, found "
                    f"{found}; this layer cannot be updated in place"
                )
            yield kernel, value

    def close(self) -> None:
        """Bring the modules back in kernel form, once all of `processed` is copied."""
        self.abandon()

    def abandon(self) -> None:
        """Bring the modules back in kernel form, with whatever values that holds; idempotent."""
        while self._kept:
            self._kept.pop().put_back()


@contextmanager
def to_meta(model: nn.Module, ties: Sequence[Tie]) -> Generator[None]:
    """The whole model in checkpoint form on the meta device while the context is open.

    Its loaders can then be driven without a byte being written. The model is left as found, also
    when the body raises.
    """
    kept: list[ModuleTensors] = []
    try:
        for module in model.modules():
            kept.append(ModuleTensors.of(module, frozenset(_vllm.checkpoint_form(module))))
            _vllm.restore_on_meta(module)
        retie(ties)
        yield
    finally:
        while kept:
            kept.pop().put_back()


def _alike(left: torch.Tensor | None, right: torch.Tensor) -> bool:
    return left is not None and (left.shape, left.dtype) == (right.shape, right.dtype)
