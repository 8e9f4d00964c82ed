"""The model's own tensors and their storages."""

from dataclasses import dataclass, field

import torch

__all__ = ["Destination", "DestinationStorage"]


@dataclass(slots=True, eq=False)
class Destination:
    """A tensor of the model, as it was when recording began.

    Attributes:
        places: (module, attribute) pairs that hold it; writes are recorded at the first.
        kind: ``"parameter"``, ``"buffer"`` or ``"attribute"``, by its first place.
        original: the tensor found there.
        tensor: what stands in for it while recording; ``original`` itself when that is on meta.
        storage: where both are.
        keys: the storage keys of both.
        offset, shape, stride, dtype: the tensor's geometry in its storage.
    """

    places: list[tuple[str, str]]
    kind: str
    original: torch.Tensor
    tensor: torch.Tensor
    storage: "DestinationStorage"
    keys: tuple[int, int]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def module(self) -> str:
        return self.places[0][0]

    @property
    def param(self) -> str:
        return self.places[0][1]

    def view(self) -> torch.Tensor:
        """A meta tensor of the same geometry, in a storage of its own."""
        return torch.empty(0, dtype=self.dtype, device="meta").set_(
            torch.empty(0, dtype=torch.uint8, device="meta").untyped_storage(),
            self.offset,
            self.shape,
            self.stride,
        )


@dataclass(slots=True, eq=False)
class DestinationStorage:
    """A storage of the model and the destinations in it (nearly always one).

    Attributes:
        destinations: parameters first.
        is_real: whether the model's own tensors hold values (are not on meta).
        written: whether anything landed in it.
        programmed: whether a program writes it, so that all that lands in it is part of that.
        read_at: ``file:line`` where a loader read its real values, or None.
    """

    destinations: list[Destination] = field(default_factory=list)
    is_real: bool = False
    written: bool = False
    programmed: bool = False
    read_at: str | None = None

    @property
    def module(self) -> str:
        """The module whose program writes it, if one does."""
        return self.destinations[0].module
