"""What in-place operations leave written, and whose old values they need."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake import DataDependentError, record
from rdt_bake.testing import TOY_WEIGHTS, ToyModel, check_recording, each_weight, refusal
from rdt_plan import ParamMeta

ROWS = torch.tensor([2, 0])


@pytest.mark.parametrize(
    "write, missing",
    [
        (lambda p, w: p.index_put_((ROWS,), w[:2] * 2), 8),
        (lambda p, w: p.index_put_((ROWS, torch.tensor([3, 1])), w[0, :2]), 14),
        (lambda p, w: p.__setitem__((slice(None), ROWS), w[:, :2]), 8),
        (lambda p, w: p.index_copy_(1, ROWS, w[:, :2]), 8),
        (lambda p, w: p[1:].index_fill_(0, ROWS, 3), 8),
        (lambda p, w: p.t().masked_fill_(torch.eye(4).bool(), 3), 12),
        (lambda p, w: p.scatter_(1, ROWS.expand(4, 2), w[:, :2]), 8),
        (lambda p, w: torch.neg(w[:2], out=p[1:3]), 8),
    ],
)
def test_chosen_elements_count_as_written(write: Callable[..., Any], missing: int) -> None:
    recording = check_recording(
        ToyModel, each_weight(lambda m, w: write(m.inner.weight.data, w)), TOY_WEIGHTS
    )
    (lacking,) = recording.uncovered
    assert lacking.num_missing == missing


@pytest.mark.parametrize(
    "write",
    [
        lambda p, w: p.index_put_((w[0].long() % 4,), w),
        lambda p, w: p.index_put_((ROWS,), w[:2], accumulate=True),
        lambda p, w: (p.index_put_((ROWS,), w[:2]), p.neg_()),
        lambda p, w: p.scatter_add_(0, ROWS.expand(4, 2), w),
    ],
)
def test_old_values_are_refused(write: Callable[..., Any]) -> None:
    assert refusal(DataDependentError, lambda m, w: write(m.inner.weight.data, w)).weight == "w"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3)))
def test_reading_what_was_chosen(written: list[int], read: list[int]) -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        param = model.inner.weight.data
        param[torch.tensor(written)] = weight[: len(written)]
        for row in read:
            param[row] += 1

    if set(read) <= set(written):
        recording = check_recording(ToyModel, each_weight(action), TOY_WEIGHTS)
        assert sum(x.num_missing for x in recording.uncovered) == 16 - 4 * len(set(written))
    else:
        refusal(DataDependentError, action)


def test_what_is_exempt_may_be_read() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        model.inner.weight.data.mul_(weight)

    recording = check_recording(
        ToyModel, each_weight(action), TOY_WEIGHTS, exempt=lambda module, param: True
    )
    assert len(recording.programs) == 1


def test_rows_of_a_large_parameter() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(5, 1 << 23, device="meta"), requires_grad=False)

    model = Large()

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in pairs:
            model.w.data[torch.tensor([4, 0, 2])] = weight

    recording = record(model, load, [ParamMeta("w", "float32", (3, 1 << 23))])
    (lacking,) = recording.uncovered
    assert (lacking.num_missing, lacking.bounds) == (2 << 23, ((1, 4), (0, 1 << 23)))
