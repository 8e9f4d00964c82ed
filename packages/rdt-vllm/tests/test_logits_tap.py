"""Logits are copied as computed, call by call, and compared bit for bit."""

import torch
from torch import nn

from rdt_vllm.testing.bits import flip_byte
from rdt_vllm.testing.logits_tap import LogitsTap, compare_logits


class Model(nn.Module):
    """Reuses one buffer for its logits, as an engine may; says nothing about no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(2, 4)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None if hidden.numel() == 0 else self.out.copy_(hidden)


def tapped(*calls: torch.Tensor) -> LogitsTap:
    model = Model()
    tap = LogitsTap(model)
    tap.attach()
    for hidden in calls:
        model.compute_logits(hidden)
    tap.detach()
    model.compute_logits(torch.ones(2, 4))  # no longer recorded
    return tap


def test_each_call_is_copied_while_attached() -> None:
    first, second = torch.rand(2, 4), torch.rand(2, 4)

    tap = tapped(first, torch.empty(0), second)

    assert [torch.equal(*pair) for pair in zip(tap.logits, (first, second), strict=True)] == [
        True,
        True,
    ]
    assert tap.num_bytes == 2 * 2 * 4 * 4
    assert tap.digest() == tapped(first, second).digest() != tapped(second, first).digest()
    assert tapped().digest() == ""


def test_one_flipped_bit_is_named_by_call_and_byte() -> None:
    first, second = torch.rand(2, 4), torch.rand(2, 4)
    found, expected = tapped(first, second), tapped(first, second)
    assert compare_logits(found, expected) == []

    byte = flip_byte(found.logits[1])

    (mismatch,) = compare_logits(found, expected)
    assert (mismatch.path, mismatch.first_byte) == ("logits[1]", byte)


def test_missing_calls_and_other_dtypes_differ() -> None:
    first = torch.rand(2, 4)
    other = tapped(first)
    other.logits[0] = other.logits[0].bfloat16()

    assert len(compare_logits(tapped(first), tapped(first, first))) == 1
    assert "bfloat16" in compare_logits(other, tapped(first))[0].reason
