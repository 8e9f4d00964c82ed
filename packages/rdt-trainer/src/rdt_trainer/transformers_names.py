"""Checkpoint names of a ``transformers`` model, from that library's own conversion table.

``transformers`` loads a checkpoint by a table of conversions for each architecture, and
``save_pretrained`` runs that table backwards. Here it is run backwards once, over meta twins of
the model's tensors, and what each checkpoint name holds is read off the twin it is a view of. So
every architecture whose way back is a matter of views is served, and none is listed here.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rdt_trainer.errors import SourceError
from rdt_trainer.module_tensors import module_tensors, transient_buffers
from rdt_trainer.named_views import NamedView, Region
from rdt_trainer.wrappers import unwrapped

__all__ = ["transformers_names"]

REMEDY = (
    "serve what is computed from a WeightSource of your own, or pass ModuleSource names= of your "
    "own if the engine loads what the module holds"
)
aten = torch.ops.aten


def transformers_names(model: nn.Module) -> dict[str, str | tuple[NamedView, ...] | None]:
    """What each tensor of ``model`` is in the checkpoint that its ``save_pretrained`` writes.

    A table for `ModuleSource`'s ``names=``, with ``persistent_buffers=True``, from a tensor's
    name in the module to its checkpoint name, to views with names of their own, or to None where
    nothing is written. Wrappers around and within the model are seen through; of tied tensors the
    name that is written is kept. Moves no data.

    Raises:
        SourceError: ``transformers`` 5 is not installed, ``model`` is none of its models or is
            quantised, or the way back computes something; names the checkpoint name, the tensors
            and the operation. Also what cannot be served as it is, see `ModuleSource`.
    """
    modeling, loading = _transformers()
    tensors = module_tensors(model, persistent_buffers=True)
    plain: Any = _without_wrappers(unwrapped(model), {})
    if not isinstance(plain, modeling.PreTrainedModel):
        raise SourceError(
            f"{type(unwrapped(model)).__qualname__} is no transformers PreTrainedModel: expected "
            "one, wrapped by torch at most; serve the model within, or use ModuleSource(module)"
        )
    if (quantizer := getattr(plain, "hf_quantizer", None)) is not None:
        raise SourceError(
            f"the model is quantised by {type(quantizer).__name__}: expected plain weights; serve "
            "the model before it is quantised, or dequantize() it"
        )
    written = _written(plain, modeling)
    twins = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    # A tensor by its identity under the one name that is written, which need not be its first.
    first = {_identity(tensor): name for name, tensor in reversed(tensors.items())}
    tensor_names = {name: first[identity] for name, identity in written.items()}
    views = _views(plain, {name: twins[tensor] for name, tensor in tensor_names.items()}, loading)
    found: dict[str, list[NamedView]] = {name: [] for name in tensor_names.values()}
    owners = {_storage(twins[name]): name for name in found}
    for name, view in views.items():
        found[owners[_storage(view)]].append(NamedView(name, Region.of(view)))
    return {
        name: _simplest(found[name], twins[name]) if name in found else None for name in tensors
    }


def _transformers() -> tuple[Any, Any]:
    try:
        import transformers.core_model_loading as loading
        import transformers.modeling_utils as modeling

        _ = loading.revert_weight_conversion, modeling.remove_tied_weights_from_state_dict
    except (ImportError, AttributeError) as error:
        raise SourceError(
            f"transformers' conversion table cannot be read ({error}): expected transformers 5; "
            "install rdt-trainer[transformers]"
        ) from error
    return modeling, loading


def _without_wrappers(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module tree as it was before anything wrapped it; tensors are shared."""
    if module not in done:
        # fully_shard gives every module a class of its own.
        kind = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
        plain: nn.Module = object.__new__(kind)
        done[module] = plain
        plain.__dict__.update(module.__dict__)
        plain.__dict__["_modules"] = {
            name: None if inner is None else _without_wrappers(unwrapped(inner), done)
            for name, inner in module._modules.items()
        }
    return done[module]


def _written(model: Any, modeling: Any) -> dict[str, tuple[Any, ...]]:
    """The names, before conversion, of the tensors that are written, and which tensors they are."""
    transient = transient_buffers(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= {
        name: buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in transient
    }
    for ignored in model._keys_to_ignore_on_save or ():
        named.pop(ignored, None)
    identities = {name: _identity(tensor) for name, tensor in named.items()}
    # Tied names are told by their memory: one byte stands in for each tensor.
    memory = {identity: torch.empty(1, dtype=torch.int8) for identity in identities.values()}
    stand_ins = {name: memory[identity] for name, identity in identities.items()}
    try:
        kept = modeling.remove_tied_weights_from_state_dict(stand_ins, model)
    except RuntimeError as error:
        raise SourceError(f"save_pretrained does not write this model: {error}") from error
    return {name: identities[name] for name in kept}


def _views(model: Any, twins: dict[str, torch.Tensor], loading: Any) -> dict[str, torch.Tensor]:
    """Each checkpoint name's view of a twin."""
    # Reversing a conversion changes it, and the model keeps those that it was loaded with.
    model.__dict__["_weight_conversions"] = deepcopy(getattr(model, "_weight_conversions", None))
    tracer = _Tracer(twins)
    try:
        with torch.no_grad(), tracer:
            views = loading.revert_weight_conversion(model, dict(twins))
    except Exception as error:
        raise SourceError(
            f"the conversion of {tracer.last} to checkpoint names failed on meta tensors with "
            f"{type(error).__name__}: {error}; {REMEDY}"
        ) from error
    for name, view in views.items():
        if (computed := tracer.computed(view)) is not None:
            raise SourceError(
                f"{name} is no view: save_pretrained computes it from {computed}; {REMEDY}"
            )
    return views


class _Tracer(TorchDispatchMode):
    """Follows tensors by their storages while operations run, and takes no copy for one.

    A copy of a view is that view: what is asked is which elements it holds.
    """

    def __init__(self, twins: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.last = "the model"
        self._names = {_storage(twin): name for name, twin in twins.items()}
        self._computed: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # the id of a freed storage is used again

    def computed(self, tensor: torch.Tensor) -> str | None:
        """How ``tensor`` came about, unless it is a view of an unchanged twin."""
        storage = _storage(tensor)
        return self._computed.get(storage) or (
            None if storage in self._names else "nothing that the model holds"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operands = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        names = dict.fromkeys(self._describe(operand) for operand in operands)
        if operands:
            self.last = ", ".join(names)
        how = f"{', '.join(names) or 'no tensor'} by {func}"
        if func is aten.clone.default or (func is aten.cat.default and len(operands) == 1):
            return operands[0]
        if func is aten._unsafe_view.default:  # of a copy that was not taken
            try:
                return args[0].view(args[1])
            except RuntimeError:
                result = args[0].new_empty(args[1])
        else:
            result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._computed[_storage(operands[0])] = how
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in self._names:
                self._alive.append(leaf)
                self._computed.setdefault(_storage(leaf), how)
        return result

    def _describe(self, tensor: torch.Tensor) -> str:
        storage = _storage(tensor)
        return self._computed.get(storage) or self._names.get(storage, "a constant")


def _simplest(views: list[NamedView], twin: torch.Tensor) -> str | tuple[NamedView, ...]:
    """Just the name where one view is all of the tensor."""
    is_whole = [named.view for named in views] == [Region.of(twin)]
    return views[0].name if is_whole else tuple(views)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tied tensors."""
    if isinstance(tensor, DTensor):
        return (id(tensor),)
    memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*memory, tuple(tensor.shape), tensor.stride())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
