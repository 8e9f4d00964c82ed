"""What could go into a recording unseen: each is right on other weights, or refused."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import ComputedValueError, DataDependentError, Recording
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Action = Callable[[Tensor, Tensor], Any]


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 6), requires_grad=False)


def checked(action: Action) -> Recording:
    def load(model: Holder, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in pairs:
            action(model.w.data, weight)

    recording = check_recording(Holder, load, [ParamMeta("w", "float32", (4, 6))])
    recording.require_coverage()
    return recording


def own(weight: Tensor) -> Tensor:
    return torch.zeros(4, 6).copy_(weight)


@pytest.mark.parametrize(
    "look",
    [
        lambda b: b.tolist()[0][0],
        lambda b: b.numpy()[0, 0],
        lambda b: float(torch.from_numpy(b.numpy()).sum()),
        lambda b: len(repr(b)),
        lambda b: deepcopy(b)[0, 0],
        lambda b: b.nonzero().shape[0],
        lambda b: b[b > 0].shape[0],
        lambda b: b.unique().shape[0],
        lambda b: b.untyped_storage()[0],
    ],
)
def test_values_of_a_loaders_own_tensor_are_refused(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError):
        checked(lambda param, weight: param.fill_(look(own(weight))))


def test_a_tensor_that_numpy_writes_into_takes_no_weights() -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        blank = torch.empty(4, 6)
        blank.numpy()[:] = 7
        blank[0] = weight[0]
        param.copy_(blank)

    with pytest.raises(ComputedValueError, match="numpy"):
        checked(action)


def test_an_operand_that_numpy_changes_is_read_again() -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        step = torch.ones(6)
        param[:2].copy_((weight + step)[:2])
        step.numpy()[0] = 9
        param[2:].copy_((weight + step)[2:])

    checked(action)


def test_one_own_tensor_copied_into_another() -> None:
    checked(lambda param, weight: param.copy_(torch.zeros(4, 6).copy_(own(weight))))


def test_an_own_tensor_of_constants_copied_into_another() -> None:
    ones = torch.ones(4, 6)
    checked(lambda param, w: param.copy_(own(own(torch.ones_like(w))) + own(ones) * w))


def test_a_failed_change_that_the_loader_survives() -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        try:
            param.add_(torch.ones(5))
        except RuntimeError:
            param.copy_(weight)

    assert not checked(action).programs


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("start", [0, 2])
def test_results_that_enlarge_their_tensor_are_refused(start: int) -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        out = weight.new_empty(start)
        torch.add(weight, 1, out=out)
        param.copy_(out)

    with pytest.raises(ComputedValueError, match="size"):
        checked(action)


@pytest.mark.parametrize("shape", [(1,), ()])
def test_one_random_number_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ComputedValueError, match="random"):
        checked(lambda param, weight: param.copy_(torch.rand(shape)))


def test_another_default_dtype_is_refused_where_it_matters() -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        checked(lambda param, weight: param.copy_(weight.float() * 0.5))
        with pytest.raises(ComputedValueError, match="default dtype"):
            checked(lambda param, weight: param.copy_(weight.int() / 3))
    finally:
        torch.set_default_dtype(default)


def test_autocast_is_refused() -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            param.copy_(weight @ weight.t() @ weight)

    with pytest.raises(ComputedValueError, match="autocast"):
        checked(action)


def test_a_part_of_a_joined_value_of_two_dtypes() -> None:
    checked(lambda param, w: param.copy_(torch.cat([w + 1, (w * 2).bfloat16()])[4:]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_memory_filled_as_another_dtype(dtype: torch.dtype) -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        bits = weight * 1
        bits.view(dtype).fill_(63)
        param[:2].copy_(bits[:2])
        param[2:].copy_((weight + bits.clone())[2:])

    checked(action)


def test_an_index_out_of_range_is_an_error_while_recording() -> None:
    def action(param: Tensor, weight: Tensor) -> None:
        try:
            param.copy_(weight[torch.tensor([0, 1, 2, 4])])
        except IndexError:
            param.copy_(weight)

    assert not checked(action).programs
