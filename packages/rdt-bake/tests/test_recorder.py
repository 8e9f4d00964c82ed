"""What a loader may do with its weights, and what is refused, by name."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import (
    ComputedValueError,
    RebindError,
    RecordError,
    UnsupportedTensorError,
    record,
)
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
ONE = [ParamMeta("w", "float32", (4, 4))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("table", torch.tensor([2, 0, 3, 1]))
        self.scale = torch.full((4, 4), 0.5)
        self.kept: Any = None


def each(action: Callable[[Model, Tensor], Any]) -> Callable[[Model, Pairs], None]:
    def load(model: Model, pairs: Pairs) -> None:
        for _, weight in pairs:
            action(model, weight)

    return load


def refusal(kind: type[RecordError], action: Callable[[Model, Tensor], Any]) -> RecordError:
    model = Model()
    with pytest.raises(kind) as caught:
        record(model, lambda pairs: each(action)(model, pairs), ONE)
    assert type(caught.value) is kind
    return caught.value


def here() -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno}"


@pytest.mark.parametrize(
    "op, compute",
    [
        ("aten.neg.default", lambda w: -w),
        ("aten.exp.default", lambda w: w.exp()),
        ("aten.add.Tensor", lambda w: w + 1),
        ("aten.mul.Tensor", lambda w: (w * 2).t().contiguous()),
        ("aten.cat.default", lambda w: torch.cat([w[:2], w[:2]])),
        ("aten.stack.default", lambda w: torch.stack([w[0]] * 4)),
        ("aten._to_copy.default", lambda w: w.to(torch.float16)),
        ("aten._to_copy.default", lambda w: w.half().float()),
        ("aten.flip.default", lambda w: w.flip(0)),
        ("aten.index.Tensor", lambda w: w[torch.tensor([0, 1, 2, 3])]),
        ("aten.constant_pad_nd.default", lambda w: nn.functional.pad(w[:, :2], (0, 2))),
        ("aten.repeat.default", lambda w: w[:2].repeat(2, 1)),
        ("aten.where.self", lambda w: torch.where(w > 0, w, w)),
        ("aten.mm.default", lambda w: w @ w),
    ],
)
def test_a_computed_value_is_refused_when_it_lands(
    op: str, compute: Callable[[Tensor], Tensor]
) -> None:
    found = refusal(ComputedValueError, lambda m, w: m.inner.weight.data.copy_(compute(w)))
    assert (found.weight, found.op) == ("w", op)
    assert (found.module, found.param) == ("inner", "weight")
    assert found.where is not None and found.where.startswith(__file__)
    assert "'w'" in str(found) and op in str(found) and found.where in str(found)


def test_the_line_is_the_one_that_computed() -> None:
    lines = []

    def action(model: Model, weight: Tensor) -> None:
        lines.append(here())
        value = weight.square()
        model.inner.weight.data.copy_(value)

    found = refusal(ComputedValueError, action)
    path, line = lines[0].rsplit(":", 1)
    assert found.where == f"{path}:{int(line) + 1}"


def test_a_computed_value_that_lands_nowhere_is_no_error() -> None:
    def action(model: Model, weight: Tensor) -> None:
        shifted = (weight.float() + 1).sum(0)
        assert shifted.shape == (4,)
        f"{shifted}"
        model.inner.weight.data.copy_(weight)

    recording = check_recording(Model, each(action), ONE)
    assert len(recording.writes) == 1


def test_a_composed_loader_is_refused() -> None:
    """It copies, then rewrites the parameter from itself."""

    def action(model: Model, weight: Tensor) -> None:
        param = model.inner.weight
        param.data.copy_(weight)
        param.data.copy_(-torch.exp(param.float()))

    found = refusal(ComputedValueError, action)
    assert (found.weight, found.op) == ("w", "aten.neg.default")


def test_copying_a_parameter_onto_itself_is_nothing() -> None:
    def action(model: Model, weight: Tensor) -> None:
        model.inner.weight.data.copy_(weight)
        model.inner.weight.data.copy_(model.inner.weight)

    assert len(check_recording(Model, each(action), ONE).writes) == 1


def test_copying_one_parameter_into_another_is_refused() -> None:
    found = refusal(
        ComputedValueError, lambda m, w: m.inner.weight.data[0].copy_(m.inner.weight.data[1])
    )
    assert "inner.weight" in str(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda p, w: p.mul_(2),
        lambda p, w: p.add_(w),
        lambda p, w: p.index_put_((torch.tensor([0]),), w[0]),
        lambda p, w: p.normal_(),
        lambda p, w: torch.add(w, w, out=p),
        lambda p, w: p.masked_fill_(w > 0, 0.0),
    ],
)
def test_computing_in_place_in_the_model_is_refused(change: Callable[..., Any]) -> None:
    found = refusal(ComputedValueError, lambda m, w: change(m.inner.weight.data, w))
    assert (found.weight, found.param) == ("w", "weight")


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.fill_(0),
        lambda w: w[0].zero_(),
        lambda w: w.mul_(2),
        lambda w: w.t().copy_(w),
    ],
)
def test_a_changed_source_is_a_computed_value(change: Callable[[Tensor], Any]) -> None:
    def action(model: Model, weight: Tensor) -> None:
        change(weight)
        model.inner.weight.data.copy_(weight)

    assert refusal(ComputedValueError, action).weight == "w"


def test_what_landed_before_its_source_changed_stays() -> None:
    def load(model: Model, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.inner.weight.data.copy_(weight.contiguous())
            weight.zero_()

    model = Model()
    assert len(record(model, lambda pairs: load(model, pairs), ONE).placements) == 1


def test_a_temporary_that_is_filled_and_copied_is_refused() -> None:
    def action(model: Model, weight: Tensor) -> None:
        merged = torch.empty_like(weight)
        merged[:2].copy_(weight[2:])
        model.inner.weight.data.copy_(merged)

    found = refusal(ComputedValueError, action)
    assert (found.weight, found.op) == ("w", "aten.copy_.default")


def test_writing_a_weight_into_a_tensor_nobody_holds_is_refused_at_once() -> None:
    outside = torch.zeros(4, 4)
    found = refusal(ComputedValueError, lambda m, w: outside.copy_(w))
    assert found.weight == "w" and "not reachable" in str(found)
    assert torch.count_nonzero(outside) == 0


def test_an_operation_without_meta_kernel_is_named() -> None:
    found = refusal(ComputedValueError, lambda m, w: w.to_sparse())
    assert (found.weight, found.op) == ("w", "aten._to_sparse.default")


def test_a_refusal_that_the_loader_swallows_is_raised_all_the_same() -> None:
    def action(model: Model, weight: Tensor) -> None:
        try:
            model.inner.weight.data.copy_(-weight)
        except Exception:
            model.inner.weight.data.copy_(weight)

    refusal(ComputedValueError, action)


def test_a_refusal_that_the_loader_wraps_keeps_its_class() -> None:
    def action(model: Model, weight: Tensor) -> None:
        try:
            model.inner.weight.data.copy_(-weight)
        except Exception as error:
            raise ValueError("cannot load") from error

    found = refusal(ComputedValueError, action)
    assert isinstance(found.__cause__, ValueError)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_a_cast_to_the_destinations_dtype_is_one_copy(target: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 4, dtype=target), requires_grad=False)

    def load(model: Cast, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.w.data.copy_(weight.t().to(target).contiguous()[1:3])

    (write,) = check_recording(Cast, load, ONE).placements
    assert (write.slice.dtype, write.dtype) == ("float32", str(target).removeprefix("torch."))
    assert write.slice.numel == 8


def test_a_cast_viewed_as_another_dtype_is_refused() -> None:
    def action(model: Model, weight: Tensor) -> None:
        as_bits = weight.to(torch.float8_e8m0fnu).view(torch.uint8)
        model.inner.weight.data.copy_(as_bits)

    assert refusal(ComputedValueError, action).op == "aten._to_copy.default"


COMPLEX = [ParamMeta("w", "complex64", (4, 4))]


class ComplexModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64), requires_grad=False)


def test_complex_weights_and_their_parts() -> None:
    def load(model: ComplexModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.w.data[:2].copy_(weight.t()[:2])
            torch.view_as_real(model.w.data)[2:, :, 0].copy_(weight.imag[2:])
            model.w.data.imag[2:].copy_(weight.real[:2])

    recording = check_recording(ComplexModel, load, COMPLEX)
    assert recording.uncovered == ()


@pytest.mark.parametrize(
    "odd", [torch.conj, lambda w: w.conj().imag, lambda w: w.mH, lambda w: torch._neg_view(w)]
)
def test_conjugated_and_negated_views_are_refused(odd: Callable[[Tensor], Tensor]) -> None:
    model = ComplexModel()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.w.data.copy_(odd(weight))

    with pytest.raises(UnsupportedTensorError, match=r"'w'.*conjugate or negative bit"):
        record(model, load, COMPLEX)


def test_clones_of_conjugated_views_are_no_copies() -> None:
    model = ComplexModel()
    with pytest.raises((ComputedValueError, UnsupportedTensorError), match="'w'"):
        record(model, lambda pairs: [model.w.copy_(w.conj().clone()) for _, w in pairs], COMPLEX)


class Foreign(Tensor):
    """A tensor class that dispatches operations itself."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Foreign":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [a.inner if isinstance(a, Foreign) else a for a in args]
        out = func(*unwrapped, **(kwargs or {}))
        return cls(out) if func is torch.ops.aten.detach.default else out


def test_foreign_classes_are_refused_as_sources() -> None:
    found = refusal(
        UnsupportedTensorError,
        lambda m, w: m.inner.weight.data.copy_(Foreign(torch.ones(4, 4))),
    )
    assert "Foreign" in str(found)


def test_foreign_classes_are_refused_as_destinations() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(Foreign(torch.ones(4, 4)), requires_grad=False)

    model = Quantised()
    with pytest.raises(UnsupportedTensorError, match=r"'w'.*Foreign"):
        record(model, lambda pairs: [model.w.copy_(w) for _, w in pairs], ONE)
    # And when no loader touches it, it counts as never written.
    (lacking,) = record(model, lambda pairs: None, ONE).uncovered
    assert (lacking.param, lacking.num_missing) == ("w", 16)


def sparse_like(weight: Tensor) -> Tensor:
    at = torch.zeros(2, 1, dtype=torch.int64, device=weight.device)
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        2, 0, [4, 4], at, weight[0, :1], layout=torch.sparse_coo, device=weight.device
    )


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(4).to_sparse()
    found = refusal(UnsupportedTensorError, lambda m, w: m.inner.weight.data.copy_(sparse))
    assert "torch.sparse_coo" in str(found)
    found = refusal(UnsupportedTensorError, lambda m, w: sparse_like(w))
    assert found.weight == "w"


def test_expanded_destinations_are_refused() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4), requires_grad=False)

    model = Row()
    with pytest.raises(UnsupportedTensorError, match="repeats elements"):
        record(model, lambda pairs: [model.w.data.expand(4, 4).copy_(w) for _, w in pairs], ONE)


def test_giving_a_parameter_other_memory_is_refused() -> None:
    for change in (lambda p, w: p.resize_(8), lambda p, w: p.set_(w)):
        found = refusal(RebindError, lambda m, w, c=change: c(m.inner.weight.data, w))
        assert found.param == "weight"


def test_many_copies_at_once() -> None:
    def load(model: Model, pairs: Pairs) -> None:
        for _, weight in pairs:
            torch._foreach_copy_(list(model.inner.weight.data.unbind()), list(weight.unbind(1)))

    assert len(check_recording(Model, load, ONE).placements) == 4


def test_loaders_that_hold_the_original_parameter_are_seen() -> None:
    """A loader bound to the parameter itself, not looked up in the model, writes through it."""
    models: dict[int, nn.Parameter] = {}

    def make() -> Model:
        model = Model()
        models[id(model)] = model.inner.weight
        model.kept = model  # the model outlives the call, so that its id stays its own
        return model

    def load(model: Model, pairs: Pairs) -> None:
        for _, weight in pairs:
            models[id(model)].data[1:].copy_(weight[1:])
            models[id(model)].data[0].fill_(3)

    recording = check_recording(make, load, ONE)
    assert (len(recording.placements), len(recording.fills)) == (1, 1)


def test_recording_writes_nothing_real() -> None:
    model = Model()
    original = model.inner.weight
    before = original.clone()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            original.data.copy_(weight)
            original.data[0].fill_(7)
            model.scale.fill_(9)
            model.table.zero_()

    record(model, load, ONE)
    assert torch.equal(original, before)
    assert model.scale.unique().tolist() == [0.5] and model.table.tolist() == [2, 0, 3, 1]


def test_odd_temporaries_that_land_nowhere_are_no_error() -> None:
    def action(model: Model, weight: Tensor) -> None:
        torch.full((2,), 1j, device=weight.device)
        weight.new_empty(3).exponential_()
        model.inner.weight.data.copy_(weight)

    check_recording(Model, each(action), ONE)


def test_moving_a_weight_to_an_accelerator_is_looked_through() -> None:
    """Its own name for ``weight.to("cuda")``, which a torch without CUDA refuses earlier."""
    model = Model()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            moved = torch.ops.aten._to_copy(weight, device=torch.device("cuda"))
            model.inner.weight.data.copy_(moved.t())

    (write,) = record(model, load, ONE).placements
    assert write.slice.numel == 16 and write.stride == (1, 4)


def test_errors_of_operations_stay_what_they_are() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="shape"):
        record(model, lambda pairs: [torch.zeros(2, 3) @ torch.zeros(2, 3) for _ in pairs], ONE)
    with pytest.raises(RuntimeError, match="broadcast"):
        record(model, lambda pairs: [w + w[:3] for _, w in pairs], ONE)
    with pytest.raises(RuntimeError, match="broadcast"):
        record(model, lambda pairs: [w.add_(w[:3]) for _, w in pairs], ONE)
