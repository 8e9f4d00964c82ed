"""Copies drawn at random, the bases they run over, and what they must make of them."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from rdt_transport.copies import Copy

__all__ = ["DrawnCopies", "copied", "drawn_copies", "random_bytes"]

_EXTENTS = (0, 1, 2, 3, 4, 5, 8, 17, 33, 130)
_MOST_ELEMENTS = 6000


class DrawnCopies(NamedTuple):
    """Copies, each with a source and a target of its own; the bases are uint8, 1-D."""

    copies: list[Copy]
    sources: list[Tensor]
    targets: list[Tensor]


@st.composite
def drawn_copies(draw: st.DrawFn, most: int = 3) -> DrawnCopies:
    """Any items, strides, orders of dims and alignments, up to ``most`` copies."""
    drawn = DrawnCopies([], [], [])
    for index in range(draw(st.integers(1, most))):
        shape = tuple(draw(st.lists(st.sampled_from(_EXTENTS), max_size=6)))
        while prod(shape) > _MOST_ELEMENTS:
            shape = shape[1:]
        item = draw(st.sampled_from((1, 2, 4, 8, 16)))
        offsets = st.integers(0, 40).map(lambda n, item=item: n * item) | st.integers(0, 40)
        sides = [(draw(offsets), *_strides(draw, shape)) for _ in range(2)]
        (read_at, read, read_span), (write_at, written, write_span) = sides
        drawn.copies.append(Copy(index, index, read_at, write_at, shape, read, written, item))
        seed = draw(st.integers(0, 1 << 16))
        misfits = st.sampled_from((0, 0, 1, 2, 4, 6, 8, 16))
        for bases, count in (
            (drawn.sources, read_at + read_span * item),
            (drawn.targets, write_at + write_span * item),
        ):
            misfit = draw(misfits)
            bases.append(random_bytes(count + misfit, seed + len(bases))[misfit:])
    return drawn


def _strides(draw: st.DrawFn, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Strides in any order of dims, with gaps or without; and elements from first to last."""
    strides = [0] * len(shape)
    step = draw(st.sampled_from((1, 1, 1, 2, 3)))
    is_dense = draw(st.booleans())
    in_order = list(reversed(range(len(shape))))
    for dim in in_order if draw(st.booleans()) else draw(st.permutations(in_order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
        step += 0 if is_dense else draw(st.integers(0, 5))
    return tuple(strides), step


def random_bytes(count: int, seed: int) -> Tensor:
    """That many bytes, uint8."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draws)


def copied(drawn: DrawnCopies) -> list[Tensor]:
    """What the targets must hold: byte by byte, through indices."""
    expected = [target.clone() for target in drawn.targets]
    for copy in drawn.copies:
        read = _bytes_of(copy.source_offset, copy.shape, copy.source_strides, copy.item_bytes)
        write = _bytes_of(copy.target_offset, copy.shape, copy.target_strides, copy.item_bytes)
        expected[copy.target][write] = drawn.sources[copy.source][read]
    return expected


def _bytes_of(offset: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Tensor:
    at = torch.tensor(offset)
    for extent, step in zip(shape, strides, strict=True):
        at = at[..., None] + torch.arange(extent) * step * item
    return (at[..., None] + torch.arange(item)).reshape(-1)
