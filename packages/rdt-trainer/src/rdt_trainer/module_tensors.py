"""The tensors of a module that can be served, by the names they have without wrappers."""

from itertools import chain
from typing import Any

import torch
from torch import nn

from rdt_trainer.adapters import refuse_adapters, refuse_foreign_tensor
from rdt_trainer.devices import check_device
from rdt_trainer.errors import SourceError
from rdt_trainer.wrappers import name_stripper

__all__ = ["module_tensors", "transient_buffers"]

FLAT_PARAMETER = "_flat_param"
FSDP1_REMEDY = (
    "expected FSDP2 (fully_shard), whose parameters keep names and shapes, or every use of the "
    "source within FullyShardedDataParallel.summon_full_params"
)


def module_tensors(module: nn.Module, *, persistent_buffers: bool) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers on request; a tied one under the first of its names.

    Raises:
        SourceError: names the tensor that cannot be served, and says what to do: an adapter's, a
            quantised one, a shard of FSDP1, one on the meta device, or on another than the rest.
    """
    refuse_adapters(module)
    _refuse_fsdp1_shards(module)
    strip = name_stripper(module)
    found: dict[str, torch.Tensor] = {}
    first: tuple[str, torch.Tensor] | None = None
    walk = module.named_parameters()
    if persistent_buffers:
        transient = {strip(name) for name in transient_buffers(module)}
        buffers = (item for item in module.named_buffers() if strip(item[0]) not in transient)
        walk = chain(walk, buffers)
    for module_name, tensor in walk:
        name = strip(module_name)
        if name.rpartition(".")[2] == FLAT_PARAMETER:
            raise SourceError(
                f"{module_name} is FSDP1's flat parameter, which has no checkpoint names: "
                f"{FSDP1_REMEDY}"
            )
        if tensor.is_meta:
            raise SourceError(
                f"{module_name} is on the meta device: expected a parameter with data; "
                "materialise the module first"
            )
        first = first or (module_name, tensor)
        check_device(module_name, tensor, *first)
        refuse_foreign_tensor(module_name, tensor)
        if name in found:
            raise SourceError(
                f"{module_name} is named {name} without its wrappers, as another tensor is: "
                "expected distinct names; serve the wrapped module"
            )
        found[name] = tensor
    return found


def transient_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers that no checkpoint holds."""
    return {
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set
    }


def _refuse_fsdp1_shards(module: nn.Module) -> None:
    """FSDP1 with ``use_orig_params`` keeps the names, but each rank has flat pieces under them."""
    for inner in module.modules():
        handle: Any = getattr(inner, "_handle", None)
        flat: Any = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            found = getattr(info.module, info.param_name, None)
            if found is not None and found.shape != shape:
                raise SourceError(
                    f"{info.module_name}.{info.param_name} is FSDP1's shard {list(found.shape)} of "
                    f"a parameter {list(shape)}: {FSDP1_REMEDY}"
                )
