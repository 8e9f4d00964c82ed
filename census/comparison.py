"""Two models built alike, compared bit for bit, at every place where a model keeps a tensor."""

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from rdt_bake.places import places
from rdt_vllm.testing.bits import first_difference

__all__ = ["differences", "pattern_of", "patterns"]


def differences(expected: nn.Module, found: nn.Module) -> list[str]:
    """One phrase for each parameter, buffer or tensor attribute that is not bit for bit equal."""
    left, right = _tensors(expected), _tensors(found)
    phrases = []
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            phrases.append(f"{name} is {'missing' if name in left else 'new'}")
            continue
        a, b = left[name], right[name]
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            phrases.append(f"{name} is {_layout(b)}, expected {_layout(a)}")
        elif a.numel() and not a.is_meta and first_difference(a, b) is not None:
            phrases.append(f"{name} has {'unwritten' if _has_new_nans(a, b) else 'other'} values")
    return phrases


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


def _has_new_nans(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether memory that nothing has written, which reads as NaN, shows in ``found`` only."""
    return bool((found.isnan() & ~expected.isnan()).any())
