"""A model small enough to say in one line what its loader does, and how a recording refuses it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rdt_bake.errors import RecordError
from rdt_bake.record import record
from rdt_plan import ParamMeta

__all__ = ["TOY_WEIGHTS", "ToyModel", "each_weight", "refusal"]

TOY_WEIGHTS = (ParamMeta("w", "float32", (4, 4)),)

Pairs = Iterable[tuple[str, Tensor]]


class ToyModel(nn.Module):
    """One parameter, ``inner.weight``; a buffer of numbers, and an attribute of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("table", torch.tensor([2, 0, 3, 1]))
        self.scale = torch.full((4, 4), 0.5)
        self.kept: Any = None


def each_weight(
    action: Callable[[ToyModel, Tensor], Any],
) -> Callable[[ToyModel, Pairs], None]:
    """A loader that does ``action`` with every weight."""

    def load(model: ToyModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            action(model, weight)

    return load


def refusal(kind: type[RecordError], action: Callable[[ToyModel, Tensor], Any]) -> RecordError:
    """The error, of exactly ``kind``, by which recording ``action`` on `TOY_WEIGHTS` is refused."""
    model, load = ToyModel(), each_weight(action)
    try:
        record(model, lambda pairs: load(model, pairs), TOY_WEIGHTS)
    except RecordError as error:
        assert type(error) is kind, f"expected {kind.__name__}, found {error!r}"
        return error
    raise AssertionError(f"expected {kind.__name__}, found nothing refused")
