"""One unit of live installing: modules whose slices land in the tensors that kernels use."""

from collections.abc import Mapping

import torch
from torch import nn

from rdt_bake import find_tensor

__all__ = ["LiveUnit"]


class LiveUnit:
    """Modules whose post-processing is the identity, so that nothing has to be done for a sync.

    It has the surface of `LayerwiseUnit`. What is written stays written when a sync is given up.

    Args:
        modules: by dotted path, in the model's order.

    Attributes:
        is_live: True.
        is_open: between `open` and `close` or `abandon`.
    """

    is_live = True

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def destination(self, path: str, name: str) -> torch.Tensor:
        """The live tensor, as the module has it now."""
        module = self.modules[path]
        found = module._parameters.get(name)  # nearly always, and asked for often
        return find_tensor(module, "", name) if found is None else found

    def given(self) -> list[torch.Tensor]:
        return []  # none of what the modules hold is ever let go

    def processed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []

    def close(self) -> None:
        self.is_open = False

    def abandon(self) -> None:
        self.is_open = False
