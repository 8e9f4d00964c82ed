"""Real tensors that a loader makes for itself while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rdt_bake.tensors import has_storage, storage_key, tensors_in

__all__ = ["Own", "OwnTensors"]


@dataclass(slots=True)
class Own:
    """The storage of one.

    Attributes:
        weight: the source that was being loaded when it was made.
        dtype, shape, stride: of the tensor that was made.
        is_blank: whether it holds nothing yet.
        is_drawn: whether it holds random numbers.
        is_shared: whether its memory was given to what is no tensor, an array of numpy say.
    """

    weight: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_blank: bool
    is_drawn: bool
    is_shared: bool = False


class OwnTensors:
    """The loader's own real tensors, by the keys of their storages."""

    def __init__(self) -> None:
        self._by_key: dict[int, Own] = {}

    def get(self, tensor: Tensor) -> Own | None:
        """What is known of the tensor's storage; None when the loader did not make it."""
        return self._by_key.get(storage_key(tensor)) if has_storage(tensor) else None

    def add(
        self, func: Any, args: Any, tensor: Tensor, weight: str | None, *, is_blank: bool
    ) -> None:
        """Notes one that an operation on real tensors made while ``weight`` was being loaded."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        is_drawn = self._draws(func, args)
        own = Own(weight, tensor.dtype, shape, stride, is_blank, is_drawn)
        self._by_key[storage_key(tensor)] = own

    def change(self, func: Any, args: Any, written: Sequence[Tensor]) -> None:
        """Notes that an operation on real tensors wrote into some."""
        is_drawn = self._draws(func, args)
        for tensor in written:
            own = self.get(tensor)
            if own is not None:
                own.is_blank = False
                own.is_drawn = own.is_drawn or is_drawn

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether random numbers are in it."""
        own = self.get(tensor)
        return own is not None and own.is_drawn

    def _draws(self, func: Any, args: Any) -> bool:
        random = torch.Tag.nondeterministic_seeded in func.tags
        return random or any(map(self.is_drawn, tensors_in(args)))
