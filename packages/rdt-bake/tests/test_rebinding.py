from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import ComputedValueError, DataDependentError, RebindError, RecordError, record
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
PARAMS = [ParamMeta("a", "float32", (6, 4)), ParamMeta("b", "float32", (3, 4))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.layer.register_buffer("mean", torch.zeros(3, 4))
        self.layer.plain = torch.zeros(3, 4)
        self.layer.listed = [torch.zeros(3, 4)]


def first(action: Callable[[nn.Module, Tensor], Any]) -> Callable[[Model, Pairs], None]:
    def load(model: Model, pairs: Pairs) -> None:
        for name, weight in pairs:
            if name == "a":
                action(model.layer, weight)

    return load


def setter(name: str) -> Callable[[nn.Module, Tensor], None]:
    return lambda layer, value: setattr(layer, name, value)


@pytest.mark.parametrize(
    "rebind",
    [
        lambda layer, w: setattr(layer.weight, "data", w[:3]),
        lambda layer, w: setattr(layer.weight, "data", w[::2]),
        lambda layer, w: setattr(layer.weight, "data", w[3:].clone()),
        lambda layer, w: setattr(layer, "weight", nn.Parameter(w[:3], requires_grad=False)),
        lambda layer, w: layer.register_parameter("weight", nn.Parameter(w[:3], False)),
        lambda layer, w: setattr(layer, "mean", w[:3]),
        lambda layer, w: setattr(layer, "plain", w[:3].contiguous()),
        lambda layer, w: layer.listed.__setitem__(0, w[:3]),
    ],
)
def test_a_rebind_to_a_region_of_a_source_is_a_placement(
    rebind: Callable[[nn.Module, Tensor], Any],
) -> None:
    recording = check_recording(Model, first(rebind), PARAMS, exempt=lambda *_: True)
    (write,) = recording.placements
    assert write.slice.name == "a" and write.module == "layer"
    assert recording.consumed == {"a"}


def test_what_was_written_to_memory_a_rebind_replaced_is_dropped() -> None:
    def load(model: Model, pairs: Pairs) -> None:
        (_, a), (_, b) = pairs
        model.layer.weight.data[1:].copy_(b[1:])
        model.layer.weight.data = a[2:5]

    recording = check_recording(Model, load, PARAMS)
    assert [write.slice.name for write in recording.placements] == ["a"]


def number(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def test_a_rebind_to_a_number_is_a_fill() -> None:
    load = first(lambda layer, w: setattr(layer, "weight", number(torch.full((3, 4), 2.0))))
    assert [write.value for write in check_recording(Model, load, PARAMS).fills] == [2.0]


def test_a_new_parameter_over_the_same_memory_is_no_rebind() -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        layer.weight.data.copy_(weight[:3])
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)

    assert len(check_recording(Model, first(action), PARAMS).writes) == 1


def test_a_rebind_that_is_undone_is_no_rebind() -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        own = layer.weight.data
        layer.weight.data = weight[:3]
        layer.weight.data = own
        layer.weight.data.copy_(weight[:3])

    assert len(check_recording(Model, first(action), PARAMS).writes) == 1


def test_caches_that_have_nothing_to_do_with_weights_may_change() -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        layer.weight.data.copy_(weight[:3])
        layer.plain = None
        layer.listed[0] = torch.arange(3)
        layer.new_cache = torch.zeros(7)

    model = Model()
    record(model, lambda pairs: first(action)(model, pairs), PARAMS)


@pytest.mark.parametrize(
    "rebind, param, weight",
    [
        (lambda layer, w: setattr(layer.weight, "data", w), "weight", "a"),
        (lambda layer, w: setattr(layer.weight, "data", w[:3].half()), "weight", "a"),
        (lambda layer, w: setattr(layer, "fresh", w), "fresh", "a"),
        (lambda layer, w: setattr(layer, "fresh", nn.Parameter(torch.rand(2))), "fresh", "a"),
        (lambda layer, w: layer.listed.append(w.exp()), "listed[1]", "a"),
        (lambda layer, w: setattr(layer, "weight", None), "weight", None),
        (lambda layer, w: delattr(layer, "weight"), "weight", None),
        (lambda layer, w: delattr(layer, "mean"), "mean", None),
        (lambda layer, w: setattr(layer.weight, "data", layer.weight.data.t()), "weight", None),
    ],
)
def test_other_rebinds_are_refused_by_name(
    rebind: Callable[[nn.Module, Tensor], Any], param: str, weight: str | None
) -> None:
    model = Model()
    with pytest.raises(RebindError) as caught:
        record(model, lambda pairs: first(rebind)(model, pairs), PARAMS)
    assert (caught.value.module, caught.value.param) == ("layer", param)
    assert caught.value.weight == weight
    assert f"layer.{param}" in str(caught.value)


@pytest.mark.parametrize(
    "rebind, param, kind",
    [
        (
            lambda layer, w: setattr(layer.weight, "data", torch.rand_like(w[:3])),
            "weight",
            ComputedValueError,
        ),
        (
            lambda layer, w: setattr(layer, "weight", nn.Parameter(torch.rand(3, 4))),
            "weight",
            ComputedValueError,
        ),
        (lambda layer, w: setattr(layer, "mean", torch.rand(3, 4)), "mean", ComputedValueError),
        (lambda layer, w: setattr(layer, "mean", layer.weight.data), "weight", DataDependentError),
    ],
)
def test_a_rebind_to_what_no_load_makes_again_is_refused(
    rebind: Callable[[nn.Module, Tensor], Any], param: str, kind: type[RecordError]
) -> None:
    model = Model()
    with pytest.raises(kind) as caught:
        record(model, lambda pairs: first(rebind)(model, pairs), PARAMS)
    assert (caught.value.module, caught.value.param) == ("layer", param)


def test_a_rebind_to_real_memory_is_refused_even_where_torch_does() -> None:
    """A meta tensor takes no real data: torch raises, and the error says what it means."""
    model = Model()
    load = first(lambda layer, w: setattr(layer.weight, "data", torch.rand(3, 4)))
    with pytest.raises(RebindError, match=r"'a'.*memory") as caught:
        record(model, lambda pairs: load(model, pairs), PARAMS)
    assert caught.value.where is not None and caught.value.where.startswith(__file__)


@pytest.mark.parametrize("param", ["weight", "mean", "plain"])
def test_a_rebind_to_a_computed_value_is_computed(param: str) -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        layer.weight.data = weight[:3]
        tensor = getattr(layer, param)
        if param == "weight":
            tensor.data = weight[:3] + 1
        else:
            setattr(layer, param, -weight[:3])

    check_recording(Model, first(action), PARAMS)


def test_a_rebound_parameter_that_is_then_changed_is_computed() -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        layer.weight.data = weight[:3]
        layer.weight.data[0].fill_(0)
        layer.weight.data[1].mul_(2)

    (program,) = check_recording(Model, first(action), PARAMS).programs
    assert program.targets == ("weight",)


def test_a_parameter_may_be_replaced_by_what_it_held() -> None:
    def action(layer: nn.Module, weight: Tensor) -> None:
        layer.weight.data.copy_(weight[:3])
        layer.weight.data = layer.weight.data.flip(0)

    check_recording(Model, first(action), PARAMS)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)


def test_untying_is_refused() -> None:
    model = Tied()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.head.weight = nn.Parameter(weight[:3], requires_grad=False)

    with pytest.raises(RebindError, match=r"head\.weight.*tied"):
        record(model, load, PARAMS)


def test_tying_what_is_tied_is_nothing() -> None:
    def load(model: Tied, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.embed.weight.data.copy_(weight[:3])
            model.head.weight = model.embed.weight

    check_recording(Tied, load, PARAMS[:1])


def test_rebinding_the_data_of_a_tied_parameter_moves_all_its_places() -> None:
    def load(model: Tied, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.head.weight.data = weight[1:4]

    recording = check_recording(Tied, load, PARAMS[:1])
    assert [(write.module, write.param) for write in recording.writes] == [("embed", "weight")]


def test_rebinding_one_of_several_views_of_a_storage_is_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
            self.upper = nn.Parameter(self.whole.data[:3], requires_grad=False)

    model = Views()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.upper.data = weight[:3]

    with pytest.raises(RebindError, match=r"'upper'.*a view with"):
        record(model, load, PARAMS)


def test_replacing_a_tensor_that_cannot_be_watched_is_refused() -> None:
    model = nn.LazyLinear(3)

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight = nn.Parameter(weight)

    with pytest.raises(RebindError, match=r"'weight'"):
        record(model, load, PARAMS)
