"""Numbers that torch puts on the meta device are found in a second run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rdt_bake import ComputedValueError
from rdt_bake.lost_values import LostValueError
from rdt_bake.testing import TOY_WEIGHTS, ToyModel, check_recording, each_weight, refusal

Action = Callable[[Tensor, Tensor], object]


@pytest.mark.parametrize(
    "action",
    [
        lambda p, w: p.copy_(w[[3, 1, 0, 2]]),
        lambda p, w: p.copy_(w[:, [3, 1, 0, 2]]),
        lambda p, w: p.copy_(w[[0, 1, 2, 3], [3, 2, 1, 0]]),
        lambda p, w: p.copy_(w[range(3, -1, -1)]),
        lambda p, w: p.__setitem__([2, 0, 1, 3], w),
        lambda p, w: p.__setitem__((slice(None), [2, 0, 1, 3]), w),
        lambda p, w: (p.zero_(), p[:2].copy_(w[[True, False, False, True]])),
        lambda p, w: p.copy_(w * torch.tensor([1.0, 2.0, 3.0, 4.0], device=w.device)),
        lambda p, w: p.copy_(w * w.new_tensor([1.0, 2.0, 3.0, 4.0])),
        lambda p, w: p.copy_(w.index_select(1, torch.as_tensor([3, 3, 0, 1], device=p.device))),
    ],
)
def test_lists_of_numbers_keep_their_values(action: Action) -> None:
    runs: list[bool] = []

    def load(model: ToyModel, weight: Tensor) -> None:
        runs.append(weight.is_meta)
        action(model.inner.weight.data, weight)

    recording = check_recording(ToyModel, each_weight(load), TOY_WEIGHTS)
    recording.require_coverage()
    assert runs.count(True) == 2


def test_arrays_keep_their_values() -> None:
    np = pytest.importorskip("numpy")
    order = np.array([3, 1, 0, 2])
    check_recording(
        ToyModel, each_weight(lambda m, w: m.inner.weight.data.copy_(w[order])), TOY_WEIGHTS
    )


def test_one_run_is_enough_where_nothing_of_it_lands() -> None:
    runs: list[bool] = []

    def load(model: ToyModel, weight: Tensor) -> None:
        runs.append(weight.is_meta)
        assert weight[[1, 2]].shape == (2, 4)
        model.inner.weight.data.copy_(-weight)

    check_recording(ToyModel, each_weight(load), TOY_WEIGHTS)
    assert runs.count(True) == 1


def test_meta_tensors_from_outside_are_refused() -> None:
    outside = torch.ones(4, 4, device="meta")
    found = refusal(LostValueError, lambda m, w: m.inner.weight.data.copy_(w * outside))
    assert isinstance(found, ComputedValueError)
    assert (found.weight, found.op) == ("w", "aten.mul.Tensor")
