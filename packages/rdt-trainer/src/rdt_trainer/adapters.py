"""Modules whose tensors are no checkpoint's: adapters beside their base, quantised weights."""

import torch
from torch import nn

from rdt_trainer.errors import SourceError

__all__ = ["refuse_adapters", "refuse_foreign_tensor"]

# Segments that adapter libraries put into names, PEFT's first of all. Told by name and by the
# module of a class, as none of these libraries is needed here.
ADAPTER_SEGMENTS = frozenset(("base_layer", "modules_to_save"))
ADAPTER_PREFIXES = ("lora_", "ia3_", "vera_lambda_", "hada_", "lokr_", "oft_", "boft_")
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def refuse_adapters(module: nn.Module) -> None:
    """Raises `SourceError` naming the first module of an adapter."""
    for path, inner in module.named_modules():
        library = type(inner).__module__.partition(".")[0]
        if library == "peft" or _is_adapter(path.rpartition(".")[2]):
            raise _adapter(path or "the module", type(inner))
    for name, _ in module.named_parameters():
        if _is_adapter(name.rpartition(".")[2]):
            raise _adapter(name, nn.Parameter)


def refuse_foreign_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises `SourceError` for a tensor whose class gives its bytes a meaning of their own."""
    kind = type(tensor)
    if kind not in PLAIN_TENSORS:
        # Imported only now, as it takes seconds, and whoever has a DTensor has waited for them.
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            kind = type(tensor._local_tensor)
    if kind not in PLAIN_TENSORS:
        raise SourceError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}: expected a plain parameter or a "
            "DTensor of one; quantised weights are no checkpoint's, so serve the module before it "
            "is quantised, or from a source of your own that yields dequantised tensors"
        )


def _is_adapter(segment: str) -> bool:
    return segment in ADAPTER_SEGMENTS or segment.startswith(ADAPTER_PREFIXES)


def _adapter(path: str, kind: type) -> SourceError:
    return SourceError(
        f"{path} ({kind.__module__}.{kind.__qualname__}) belongs to an adapter: expected a module "
        "without, as the checkpoint's weights are base and adapter together; merge first, and "
        "serve what merge_and_unload() returns"
    )
