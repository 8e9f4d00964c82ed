"""What torch wraps around modules, taken off their names."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["name_stripper", "reshard", "sharded_modules", "unwrapped", "wrapped_child"]

# Of torch.compile, FSDP1 and activation checkpointing: no module of a user has such a name.
WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def wrapped_child(module: nn.Module) -> str | None:
    """The name a wrapper gives to what it wraps; None for any other module.

    Data-parallel wrappers say "module", which anybody may: they are told by their type.
    """
    if isinstance(module, DataParallel | DistributedDataParallel):
        return "module"
    return next((name for name in WRAPPER_SEGMENTS if name in module._modules), None)


def unwrapped(module: nn.Module) -> nn.Module:
    """``module`` itself, or what the wrappers around it wrap."""
    while (child := wrapped_child(module)) is not None:
        inner: Any = module._modules[child]
        module = inner
    return module


def name_stripper(module: nn.Module) -> Callable[[str], str]:
    """Takes the segments that wrappers add out of the name of a tensor of ``module``."""
    paths = {
        f"{path}.module" if path else "module"
        for path, inner in module.named_modules(remove_duplicate=False)
        if wrapped_child(inner) == "module"
    }

    def strip(name: str) -> str:
        segments = name.split(".")
        return ".".join(
            segment
            for end, segment in enumerate(segments, 1)
            if segment not in WRAPPER_SEGMENTS and ".".join(segments[:end]) not in paths
        )

    return strip


def sharded_modules(module: nn.Module) -> list[Any]:
    """``module`` and those within it that ``fully_shard`` was called with."""
    # Takes seconds to import, and whoever has such a module has waited for it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    return [inner for inner in module.modules() if isinstance(inner, kind)]


def reshard(modules: Iterable[Any]) -> None:
    """Have each of `sharded_modules` own its shards.

    A forward pass without a backward one leaves the outermost gathered: its parameters are then
    other tensors, of memory that is freed at any time. The next pass gathers it again.
    """
    for each in modules:
        each.reshard()
