"""Values and numbers: what a loader may ask for, and what it may write that is no weight."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rdt_bake import (
    ComputedValueError,
    DataDependentError,
    UnsupportedTensorError,
    record,
)
from rdt_bake.testing import TOY_WEIGHTS, ToyModel, check_recording, each_weight, refusal

Pairs = Iterable[tuple[str, Tensor]]


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w[0, 0].item(),
        lambda w: float(w[0, 0]),
        lambda w: bool((w > 0).all()),
        lambda w: w.tolist(),
        lambda w: w.cpu().tolist(),
        lambda w: w.to("cpu").numpy(),
        lambda w: w.numpy(force=True),
        lambda w: np.asarray(w),
        lambda w: float(w.cpu()[0, 0]),
        lambda w: w.nonzero(),
        lambda w: w[w > 0],
        lambda w: w.masked_select(w > 0),
        lambda w: w.unique(),
        lambda w: torch.equal(w, w),
        lambda w: torch.allclose(w, w),
        lambda w: w.sum().item() if w.isnan().any() else None,
        lambda w: list(range(w.argmax())),
        lambda w: w.numpy(),
    ],
)
def test_asking_for_a_value_is_refused(read: Callable[[Tensor], Any]) -> None:
    found = refusal(DataDependentError, lambda m, w: read(w))
    assert found.weight == "w"
    assert found.where is not None and found.where.startswith(__file__)


def test_asking_a_parameter_for_a_value_is_refused() -> None:
    refusal(DataDependentError, lambda m, w: m.inner.weight.sum().item())


def test_constants_of_the_model_have_their_values() -> None:
    """A buffer no weight lands in (an expert map, say) can be read, masked, and computed with."""

    def action(model: ToyModel, weight: Tensor) -> None:
        assert model.table.tolist() == [2, 0, 3, 1]
        assert int(model.table.max()) == 3
        assert model.table[model.table > 1].tolist() == [2, 3]
        for row in range(4):
            at = model.table[row].item()
            model.inner.weight.data[at].copy_(weight[row])

    recording = check_recording(ToyModel, each_weight(action), TOY_WEIGHTS)
    assert recording.uncovered == ()


def test_a_constant_that_is_written_after_it_was_read_is_refused() -> None:
    def load(model: ToyModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.inner.weight.data[int(model.table[0])].copy_(weight[0])
            model.table.copy_(weight[0])

    model = ToyModel()
    with pytest.raises(DataDependentError, match="written after its values were read") as caught:
        record(model, lambda pairs: load(model, pairs), TOY_WEIGHTS)
    assert caught.value.param == "table"


def test_a_constant_that_was_written_has_no_value() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        model.table.copy_(weight[0])
        model.table[0].item()

    assert refusal(DataDependentError, action).weight == "w"


@pytest.mark.parametrize(
    "fill",
    [
        lambda p: p.fill_(1.5),
        lambda p: p.fill_(torch.tensor(1.5)),
        lambda p: p.copy_(torch.tensor(1.5)),
        lambda p: p.copy_(torch.full((4, 4), 1.5)),
        lambda p: p.copy_(torch.tensor(1.5).to(p.device)),
        lambda p: p.copy_(torch.full_like(p, 1.5)),
        lambda p: p.copy_(p.new_full((4,), 1.5)),
        lambda p: p.copy_(torch.full((4, 4), 1.5, dtype=torch.float64, device=p.device)),
        lambda p: p.__setitem__(slice(None), 1.5),
    ],
)
def test_a_number_becomes_a_fill(fill: Callable[[Tensor], Any]) -> None:
    def load(model: ToyModel, pairs: Pairs) -> None:
        fill(model.inner.weight.data)

    recording = check_recording(ToyModel, load, TOY_WEIGHTS)
    (write,) = recording.fills
    assert (write.value, write.shape) == (1.5, (16,)) and recording.ignored == ("w",)


@pytest.mark.parametrize("zero", [lambda p: p.zero_(), lambda p: p.copy_(torch.zeros_like(p))])
def test_zeros(zero: Callable[[Tensor], Any]) -> None:
    recording = check_recording(ToyModel, lambda m, pairs: zero(m.inner.weight.data), TOY_WEIGHTS)
    assert [write.value for write in recording.fills] == [0.0]


def test_a_number_is_cast_as_torch_casts_it() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)

    recording = check_recording(
        Narrow, lambda m, pairs: m.w.data.copy_(torch.tensor(0.1)), TOY_WEIGHTS
    )
    assert recording.fills[0].value == torch.tensor(0.1).bfloat16().item()


def test_a_constant_of_the_model_that_is_one_number_becomes_a_fill() -> None:
    recording = check_recording(
        ToyModel, lambda m, pairs: m.inner.weight.data.copy_(m.scale), TOY_WEIGHTS
    )
    assert [write.value for write in recording.fills] == [0.5]


def test_a_tensor_of_several_numbers_is_brought_along() -> None:
    recording = check_recording(
        ToyModel, lambda m, pairs: m.inner.weight.data.copy_(torch.arange(4)), TOY_WEIGHTS
    )
    assert len(recording.programs) == 1 and recording.ignored == ("w",)


def test_a_large_tensor_of_several_numbers_is_refused() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(5 << 20, dtype=torch.float32), False)

    model, numbers = Large(), torch.arange(5 << 20)
    with pytest.raises(ComputedValueError, match="too large"):
        record(model, lambda pairs: model.w.data.copy_(numbers), TOY_WEIGHTS)


def test_a_number_that_the_dtype_lacks_is_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, dtype=torch.float4_e2m1fn_x2), False)

    model = Packed()
    with pytest.raises(UnsupportedTensorError, match=r"destination 'w'.*float4") as caught:
        record(model, lambda pairs: model.w.data.fill_(1), TOY_WEIGHTS)
    assert caught.value.where is not None and caught.value.where.startswith(__file__)


@pytest.mark.parametrize("dtype", ["bool", "int16", "float8_e4m3fn", "float8_e8m0fnu", "complex64"])
def test_zeros_of_every_kind_of_dtype(dtype: str) -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4).to(getattr(torch, dtype)), requires_grad=False)

    check_recording(
        Typed, lambda m, pairs: m.w.data[1:].zero_(), TOY_WEIGHTS, exempt=lambda *_: True
    )


def test_constants_of_the_model_fold_through_anything() -> None:
    outside = torch.zeros(4, 4)

    def action(model: ToyModel, weight: Tensor) -> None:
        assert model.table.unique().tolist() == [0, 1, 2, 3]
        assert (model.scale * torch.full((4, 4), 2.0)).sum() == 16
        outside.copy_(model.scale)
        assert outside.sum() == 8
        model.inner.weight.data.copy_(weight)

    check_recording(ToyModel, each_weight(action), TOY_WEIGHTS)


def test_clones_and_casts_of_a_number_are_numbers() -> None:
    def load(model: ToyModel, pairs: Pairs) -> None:
        param = model.inner.weight.data
        param[0].copy_(torch.full_like(param[0], 0.1).clone())
        param[1:].copy_(torch.full_like(param[0], 0.1).bfloat16().float())

    recording = check_recording(ToyModel, load, TOY_WEIGHTS)
    tenth = torch.tensor(0.1)
    assert [write.value for write in recording.fills] == [tenth, tenth.bfloat16().float()]
