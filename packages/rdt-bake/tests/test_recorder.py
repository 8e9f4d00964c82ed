"""What a loader may do with its weights, and what is refused, by name."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import (
    ComputedValueError,
    DataDependentError,
    RebindError,
    RecordError,
    UnsupportedTensorError,
    record,
)
from rdt_bake.testing import TOY_WEIGHTS, ToyModel, check_recording, each_weight, refusal
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]


def here() -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno}"


@torch.library.custom_op("rdt_bake_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "op, compute",
    [
        ("aten.rand_like.default", torch.rand_like),
        ("aten.bernoulli.p", lambda w: torch.bernoulli(w, 0.5) + 1),
        ("aten.copy_.default", lambda w: torch.rand(4, 4)),
        ("aten.add.Tensor", lambda w: w + torch.rand(4, 4).abs()),
        ("aten.mul.Tensor", lambda w: w * torch.empty(4, 4).normal_()),
        ("rdt_bake_tests.double.default", double),
    ],
)
def test_what_cannot_be_computed_again_is_refused_where_it_lands(
    op: str, compute: Callable[[Tensor], Tensor]
) -> None:
    found = refusal(ComputedValueError, lambda m, w: m.inner.weight.data.copy_(compute(w)))
    assert (found.weight, found.op, found.module) == ("w", op, "inner")
    assert found.where is not None and found.where.startswith(__file__)
    assert "'w'" in str(found) and op in str(found) and found.where in str(found)


def test_the_line_is_the_one_that_computed() -> None:
    lines = []

    def action(model: ToyModel, weight: Tensor) -> None:
        lines.append(here())
        value = torch.rand_like(weight)
        model.inner.weight.data.copy_(value)

    found = refusal(ComputedValueError, action)
    path, line = lines[0].rsplit(":", 1)
    assert found.where == f"{path}:{int(line) + 1}"


def test_a_computed_value_that_lands_nowhere_is_no_error() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        shifted = (weight.float() + 1).sum(0)
        assert shifted.shape == (4,)
        f"{shifted}"
        model.inner.weight.data.copy_(weight)

    recording = check_recording(ToyModel, each_weight(action), TOY_WEIGHTS)
    assert len(recording.writes) == 1


def test_copying_a_parameter_onto_itself_is_nothing() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        model.inner.weight.data.copy_(weight)
        model.inner.weight.data.copy_(model.inner.weight)

    assert len(check_recording(ToyModel, each_weight(action), TOY_WEIGHTS).writes) == 1


def test_reading_a_parameter_of_another_module_is_refused() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)

    model = Pair()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.first.weight.data.copy_(weight)
            model.second.weight.data.copy_(model.first.weight * 2)

    with pytest.raises(ComputedValueError, match=r"first\.weight") as caught:
        record(model, load, TOY_WEIGHTS)
    assert (caught.value.module, caught.value.op) == ("second", "aten.mul.Tensor")


@pytest.mark.parametrize(
    "change",
    [
        lambda p, w: p.mul_(2),
        lambda p, w: p.add_(w),
        lambda p, w: p[0].copy_(p[1]),
        lambda p, w: (p[:3].copy_(w[:3]), p.mul_(2)),
        lambda p, w: p.index_put_((torch.tensor([0]),), w[0], accumulate=True),
        lambda p, w: p.masked_fill_(w > 0, 0.0),
    ],
)
def test_using_what_a_parameter_held_before_the_load_is_refused(
    change: Callable[..., Any],
) -> None:
    found = refusal(DataDependentError, lambda m, w: change(m.inner.weight.data, w))
    assert (found.weight, found.param) == ("w", "weight")
    assert found.where is not None and found.where.startswith(__file__)


def test_random_numbers_in_the_model_are_refused() -> None:
    found = refusal(ComputedValueError, lambda m, w: m.inner.weight.data.normal_())
    assert (found.weight, found.op) == ("w", "aten.normal_.default")


def test_what_landed_before_its_source_changed_stays() -> None:
    def load(model: ToyModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.inner.weight.data.copy_(weight.contiguous())
            weight.zero_()

    model = ToyModel()
    assert len(record(model, lambda pairs: load(model, pairs), TOY_WEIGHTS).placements) == 1


def test_writing_a_weight_into_a_tensor_nobody_holds_is_refused_at_once() -> None:
    outside = torch.zeros(4, 4)
    found = refusal(ComputedValueError, lambda m, w: outside.copy_(w))
    assert found.weight == "w" and "not reachable" in str(found)
    assert torch.count_nonzero(outside) == 0


def test_an_operation_without_meta_kernel_is_named() -> None:
    found = refusal(ComputedValueError, lambda m, w: w.to_sparse())
    assert (found.weight, found.op) == ("w", "aten._to_sparse.default")


def test_a_refusal_that_the_loader_swallows_is_raised_all_the_same() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        try:
            model.inner.weight.data[0].copy_(weight.sum().item())
        except Exception:
            model.inner.weight.data.copy_(weight)

    refusal(DataDependentError, action)


def test_a_refusal_that_the_loader_wraps_keeps_its_class() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        try:
            model.inner.weight.data[0].copy_(weight.sum().item())
        except Exception as error:
            raise ValueError("cannot load") from error

    found = refusal(DataDependentError, action)
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

    (write,) = check_recording(Cast, load, TOY_WEIGHTS).placements
    assert (write.slice.dtype, write.dtype) == ("float32", str(target).removeprefix("torch."))
    assert write.slice.numel == 8


def test_a_cast_viewed_as_another_dtype_is_computed() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        as_bits = weight.to(torch.float8_e8m0fnu).view(torch.uint8)
        model.inner.weight.data.copy_(as_bits)

    assert check_recording(ToyModel, each_weight(action), TOY_WEIGHTS).bytes_pulled == 64


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
        record(model, lambda pairs: [model.w.copy_(w) for _, w in pairs], TOY_WEIGHTS)
    # And when no loader touches it, it counts as never written.
    (lacking,) = record(model, lambda pairs: None, TOY_WEIGHTS).uncovered
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
        record(
            model, lambda pairs: [model.w.data.expand(4, 4).copy_(w) for _, w in pairs], TOY_WEIGHTS
        )


def test_giving_a_parameter_other_memory_is_refused() -> None:
    for change in (lambda p, w: p.resize_(8), lambda p, w: p.set_(w)):
        found = refusal(RebindError, lambda m, w, c=change: c(m.inner.weight.data, w))
        assert found.param == "weight"


def test_many_copies_at_once() -> None:
    def load(model: ToyModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            torch._foreach_copy_(list(model.inner.weight.data.unbind()), list(weight.unbind(1)))

    assert len(check_recording(ToyModel, load, TOY_WEIGHTS).placements) == 4


def test_loaders_that_hold_the_original_parameter_are_seen() -> None:
    """A loader bound to the parameter itself, not looked up in the model, writes through it."""
    models: dict[int, nn.Parameter] = {}

    def make() -> ToyModel:
        model = ToyModel()
        models[id(model)] = model.inner.weight
        model.kept = model  # the model outlives the call, so that its id stays its own
        return model

    def load(model: ToyModel, pairs: Pairs) -> None:
        for _, weight in pairs:
            models[id(model)].data[1:].copy_(weight[1:])
            models[id(model)].data[0].fill_(3)

    recording = check_recording(make, load, TOY_WEIGHTS)
    assert (len(recording.placements), len(recording.fills)) == (1, 1)


def test_recording_writes_nothing_real() -> None:
    model = ToyModel()
    original = model.inner.weight
    before = original.clone()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            original.data.copy_(weight)
            original.data[0].fill_(7)
            model.scale.fill_(9)
            model.table.zero_()

    record(model, load, TOY_WEIGHTS)
    assert torch.equal(original, before)
    assert model.scale.unique().tolist() == [0.5] and model.table.tolist() == [2, 0, 3, 1]


def test_odd_temporaries_that_land_nowhere_are_no_error() -> None:
    def action(model: ToyModel, weight: Tensor) -> None:
        torch.full((2,), 1j, device=weight.device)
        weight.new_empty(3).exponential_()
        model.inner.weight.data.copy_(weight)

    check_recording(ToyModel, each_weight(action), TOY_WEIGHTS)


def test_moving_a_weight_to_an_accelerator_is_looked_through() -> None:
    """Its own name for ``weight.to("cuda")``, which a torch without CUDA refuses earlier."""
    model = ToyModel()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            moved = torch.ops.aten._to_copy(weight, device=torch.device("cuda"))
            model.inner.weight.data.copy_(moved.t())

    (write,) = record(model, load, TOY_WEIGHTS).placements
    assert write.slice.numel == 16 and write.stride == (1, 4)


def test_errors_of_operations_stay_what_they_are() -> None:
    model = ToyModel()
    with pytest.raises(RuntimeError, match="shape"):
        record(
            model, lambda pairs: [torch.zeros(2, 3) @ torch.zeros(2, 3) for _ in pairs], TOY_WEIGHTS
        )
    with pytest.raises(RuntimeError, match="broadcast"):
        record(model, lambda pairs: [w + w[:3] for _, w in pairs], TOY_WEIGHTS)
    with pytest.raises(RuntimeError, match="broadcast"):
        record(model, lambda pairs: [w.add_(w[:3]) for _, w in pairs], TOY_WEIGHTS)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.T.contiguous(),
        lambda w: w.T.reshape(-1).unflatten(0, (4, 4)),
        lambda w: w.T.flatten(0, 1).view(4, 4),
        lambda w: torch.cat(w.half().float().chunk(2)[:1] * 2),
        lambda w: w.to(torch.float16),
        lambda w: w.narrow(0, 1, 2).repeat_interleave(2, 0),
        lambda w: w.cpu(),
        lambda w: w.tolist(),
        lambda w: torch.allclose(w, w),
    ],
)
def test_inference_mode_changes_nothing(read: Callable[[Tensor], Any]) -> None:
    """There torch hands on ``reshape`` and its like whole, and they may copy."""

    def outcome() -> Any:
        model = ToyModel()

        def load(pairs: Pairs) -> None:
            for _, weight in pairs:
                model.inner.weight.data.copy_(read(weight))

        try:
            return record(model, load, TOY_WEIGHTS)
        except RecordError as error:
            return type(error), str(error)

    expected = outcome()
    with torch.inference_mode():
        assert outcome() == expected


# ---- spellings of views --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.T,
        lambda w: w.mT[1:3],
        lambda w: w.t()[2:].t(),
        lambda w: w.t().unflatten(0, (3, 2)),
        lambda w: w.t().view(2, 3, 4),
        lambda w: w.split([1, 3])[1],
        lambda w: torch.split(w, 2, dim=1)[2],
        lambda w: w.select(1, 4),
        lambda w: w[2],
        lambda w: w[1, 2],
        lambda w: w[:, 1::2],
        lambda w: w[..., None, 3:],
        lambda w: w[0].expand(5, 6),
        lambda w: w[:, :1].expand(-1, 3),
        lambda w: w.unflatten(1, (2, 3)).movedim(1, 0),
        lambda w: w.as_strided((3, 2), (7, 2), 1),
        lambda w: w.clone()[1:],
        lambda w: w.T.contiguous()[2],
        lambda w: w.data[1:].detach(),
        lambda w: torch.chunk(w, 2, dim=1)[1],
        lambda w: w.tensor_split(3, 1)[1],
        lambda w: torch.narrow(w, 1, 2, 3),
        lambda w: w.unbind(1)[5],
        lambda w: w.view(torch.int32)[1:].view(torch.float32),
        lambda w: w[1:3].ravel(),
        lambda w: w.swapaxes(0, 1).flatten()[4:8],
        lambda w: w.to(torch.float32)[3],
        lambda w: w[2:2],
        lambda w: w[:, 6:],
        lambda w: w.flatten()[7].view(()),
    ],
)
def test_every_spelling_of_a_view_is_one_copy_of_what_it_shows(
    view: Callable[[Tensor], Tensor],
) -> None:
    """Copied as it is, without a program, and of the weight nothing else is pulled."""
    params = [ParamMeta("w", "float32", (4, 6))]
    shown = view(torch.arange(24.0).view(4, 6))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shown.shape), requires_grad=False)

    recording = check_recording(
        Holder, lambda m, pairs: [m.weight.data.copy_(view(w)) for _, w in pairs], params
    )
    recording.require_coverage()
    assert not recording.programs and len(recording.writes) == bool(shown.numel())
    assert recording.consumed == {"w"}
    assert recording.bytes_pulled == 4 * len(shown.unique())


def test_one_weight_seen_as_two_dtypes() -> None:
    """Packed bytes, of which some are scales: two slices of one name, each in its own dtype."""

    class Unpacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Parameter(torch.zeros(4, 8, dtype=torch.uint8), requires_grad=False)
            self.scales = nn.Parameter(torch.zeros(4, 2), requires_grad=False)

    def load(model: Unpacked, pairs: Pairs) -> None:
        for _, packed in pairs:
            model.numbers.data.copy_(packed[:, :8])
            model.scales.data.copy_(packed[:, 8:].view(torch.float32))

    recording = check_recording(Unpacked, load, [ParamMeta("w", "uint8", (4, 16))])
    recording.require_coverage()
    slices = [write.slice for write in recording.placements]
    assert [(each.name, each.dtype, each.offset) for each in slices] == [
        ("w", "uint8", 0),
        ("w", "float32", 2),
    ]
    assert recording.bytes_pulled == 64


def test_one_region_that_lands_in_two_parameters_is_pulled_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 2, bias=False)
            self.second = nn.Linear(2, 4, bias=False)

    def load(model: Twice, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.first.weight.data.copy_(weight[:2])
            model.second.weight.data.copy_(weight.narrow(0, 0, 2).t())

    torch.manual_seed(0)
    recording = check_recording(Twice, load, TOY_WEIGHTS)
    recording.require_coverage()
    assert len(recording.placements) == 2 and recording.bytes_pulled == 2 * 4 * 4


def test_copies_that_bypass_a_parameters_own_loader_are_seen() -> None:
    """The memory says what is written: through the parameter, a view kept of it, or its data."""

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
            self.weight.weight_loader = self.never

        def never(self, param: nn.Parameter, weight: Tensor) -> None:
            raise AssertionError("the loader of the parameter is not asked")

    def load(model: Guarded, pairs: Pairs) -> None:
        for _, weight in pairs:
            held = model.weight.data
            model.weight[0] = weight[0]
            held.unbind()[1].copy_(weight[1])
            model.get_parameter("weight").detach()[2:].copy_(weight[2:])

    recording = check_recording(Guarded, load, TOY_WEIGHTS)
    recording.require_coverage()
    assert len(recording.placements) == 3 and not recording.programs
