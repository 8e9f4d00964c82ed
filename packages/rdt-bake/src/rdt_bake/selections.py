"""Picking rows by numbers that are known while recording."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SELECTIONS", "progressions", "selection"]

_aten = torch.ops.aten

SELECTIONS = frozenset({_aten.index.Tensor, _aten.index_select.default})
"""Operations that may pick indices of one dim."""


def selection(
    func: Any, args: Sequence[Any], known: Callable[[Any], Tensor | None]
) -> tuple[int, Tensor] | None:
    """The dim that ``func`` picks indices of, and these: 1-D, int64, none negative.

    Args:
        func: one of `SELECTIONS`.
        args: of the call; the first has a ``shape``.
        known: the real values of an argument, or None.

    Returns:
        None when it picks anything else, or when the indices are not known.

    Raises:
        IndexError: an index is out of range, which the meta device does not notice.
    """
    shape = args[0].shape
    if func is _aten.index_select.default:
        dim, given = args[1], args[2]
    else:
        chosen = [(dim, each) for dim, each in enumerate(args[1]) if each is not None]
        if len(chosen) != 1:
            return None
        dim, given = chosen[0]
    index = known(given)
    if index is None or index.ndim != 1 or not shape:
        return None
    dim %= len(shape)
    index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
    index = torch.where(index < 0, index + shape[dim], index)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < shape[dim]:
        raise IndexError(f"index out of range: dim {dim} has {shape[dim]} indices, found {given}")
    return dim, index


def progressions(index: Tensor, most: int) -> list[tuple[int, int, int]] | None:
    """(first, step, count) of few parts of ``index`` that each go up evenly; None for too many.

    >>> progressions(torch.tensor([2, 5, 8, 0, 1]), 2)
    [(2, 3, 3), (0, 1, 2)]
    """
    found: list[tuple[int, int, int]] = []
    numbers = index.tolist()
    at = 0
    while at < len(numbers):
        if len(found) == most:
            return None
        first, end, step = numbers[at], at + 1, 1
        if end < len(numbers) and numbers[end] > first:
            step = numbers[end] - first
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
            if end - at == 2 < len(numbers) and step > 1:
                end, step = at + 1, 1  # two far apart go their own ways
        found.append((first, step, end - at))
        at = end
    return found
