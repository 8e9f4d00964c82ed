"""Faults put into a replay on purpose, to see that the comparison finds them."""

from enum import StrEnum

import torch

from rdt_vllm.testing.bits import flip_byte

__all__ = ["Damage", "damaged"]


class Damage(StrEnum):
    """What goes wrong with the first write of a replay."""

    FLIP = "flip"
    """One byte of its value differs."""
    DROP = "drop"
    """It does not happen."""


def damaged(value: torch.Tensor, damage: Damage | None, number: int) -> torch.Tensor | None:
    """The value of write ``number`` as it is, or for the first one changed; None: do not write."""
    if damage is None or number > 0:
        return value
    if damage is Damage.DROP:
        return None
    value = value.clone()
    flip_byte(value)
    return value
