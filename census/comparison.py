"""Two models built alike, compared bit for bit, at every place where a model keeps a tensor."""

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from rdt_bake.places import places
from rdt_vllm.testing.bits import first_difference

__all__ = ["differences", "pattern_of", "patterns", "zeroed"]


def differences(expected: nn.Module, found: nn.Module) -> list[str]:
    """One phrase for each parameter, buffer or tensor attribute that is not bit for bit equal.

    But for what nothing has written in ``expected``: there ``found`` may hold zeros.
    """
    left, right = _tensors(expected), _tensors(found)
    phrases = []
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            phrases.append(f"{name} is {'missing' if name in left else 'new'}")
            continue
        a, b = left[name], right[name]
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            phrases.append(f"{name} is {_layout(b)}, expected {_layout(a)}")
        elif _differ(a, b) and not _is_zeroed(a, b):
            phrases.append(f"{name} has {'unwritten' if _has_new_nans(a, b) else 'other'} values")
    return phrases


def zeroed(expected: nn.Module, found: nn.Module) -> list[str]:
    """The tensors of which nothing has written a part in ``expected``, and ``found`` holds zeros.

    For two models between which there are no `differences`.
    """
    left, right = _tensors(expected), _tensors(found)
    return sorted(name for name in left if _differ(left[name], right[name]))


def pattern_of(name: str) -> str:
    """A tensor's name with its indices blanked, perhaps in a phrase.

    >>> pattern_of("layers.3.experts.12.w1")
    'layers.#.experts.#.w1'
    """
    return re.sub(r"(?<![^.'\[])\d+(?![^.'\] ])", "#", name)


def patterns(phrases: Iterable[str], most: int = 6) -> str:
    """Phrases that differ in indices only, told once, with how often; the rest is counted."""
    counts = Counter(map(pattern_of, phrases))
    shown = [p if n == 1 else f"{p} ({n} times)" for p, n in sorted(counts.items())[:most]]
    if len(counts) > most:
        shown.append(f"{len(counts) - most} more")
    return ", ".join(shown)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{each.module}.{each.param}".lstrip("."): each.tensor for each in places(model)}


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel()) and not a.is_meta and first_difference(a, b) is not None


def _is_zeroed(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether all that differs is memory that nothing has written in one, and zero in the other."""
    if not expected.is_floating_point():
        return False
    unwritten = expected.isnan() & (found == 0)
    return not _differ(expected.masked_fill(unwritten, 0), found.masked_fill(unwritten, 0))


def _has_new_nans(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether memory that nothing has written, which reads as NaN, shows in ``found`` only."""
    return bool((found.isnan() & ~expected.isnan()).any())
