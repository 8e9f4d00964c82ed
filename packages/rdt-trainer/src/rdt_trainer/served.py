"""What one checkpoint name is of a module's tensor, and how it is taken from it."""

from dataclasses import dataclass
from typing import Any

import torch

from rdt_trainer.errors import SourceError
from rdt_trainer.named_views import Region

__all__ = ["Served", "Whole", "is_member"]

Whole = tuple[str, torch.dtype, str | None]


@dataclass(frozen=True, slots=True)
class Served:
    """Where a checkpoint name's elements are.

    Attributes:
        tensor_name: of the module's tensor.
        tensor_shape: its full shape.
        region: the part of it; None is all of it.
        dtype: it is cast to this, whole, before the region is taken.
        extra_name: the further name this is; gathered for itself, as it may be served many groups
            after the first.
    """

    tensor_name: str
    tensor_shape: tuple[int, ...]
    region: Region | None
    dtype: torch.dtype
    extra_name: str | None = None

    @property
    def whole(self) -> Whole:
        """Equal for names that one gathered tensor serves."""
        return self.tensor_name, self.dtype, self.extra_name

    def is_stable(self, tensor: torch.Tensor) -> bool:
        """Whether it is served from the memory of ``tensor``: not cast, copied or gathered."""
        return self.needs_no_gather(tensor) and (self.region is None or self.region.is_contiguous)

    def needs_no_gather(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` itself is the contiguous whole that the region is taken of."""
        is_whole = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # no DTensor
        return is_whole and tensor.dtype == self.dtype and tensor.is_contiguous()

    @torch.no_grad()
    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contiguous whole; a collective of a ``DTensor``'s mesh."""
        # Cast before gathering: a bf16 gather of fp32 shards moves half the bytes.
        tensor = tensor.detach().to(self.dtype)
        gather: Any = getattr(tensor, "full_tensor", None)
        return (gather() if callable(gather) else tensor).contiguous()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What is served of the contiguous whole; shares its memory where it can."""
        return whole if self.region is None else self.region(whole).contiguous()

    def check_present(self, tensor: torch.Tensor | None) -> None:
        """Raises `SourceError` unless the module has the tensor in the shape it was declared."""
        if tensor is None or tensor.shape != self.tensor_shape:
            found = "no longer in the module" if tensor is None else f"now {list(tensor.shape)}"
            raise SourceError(
                f"{self.tensor_name} is {found}: expected the {list(self.tensor_shape)} it was "
                "when the trainer was initialised; build a new source and trainer"
            )


def is_member(tensor: torch.Tensor) -> bool:
    """Whether this rank holds some of it."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return mesh is None or mesh.get_coordinate() is not None
