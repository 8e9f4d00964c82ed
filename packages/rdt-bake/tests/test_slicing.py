"""What of a trace becomes a module's program."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rdt_bake import fetch_from, record, replay
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
PARAMS = [ParamMeta("w", "float32", (4, 6)), ParamMeta("s", "float32", (4,))]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.layer.scale = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.layer.plain = nn.Parameter(torch.zeros(4), requires_grad=False)


def test_a_parameter_that_is_read_joins_the_program() -> None:
    def load(model: Scaled, pairs: Pairs) -> None:
        weights, layer = dict(pairs), model.layer
        layer.scale.data[:2].copy_(weights["s"][:2])
        layer.scale.data[2:].copy_(weights["s"][2:])
        layer.plain.data.copy_(weights["s"])
        layer.weight.data.copy_(weights["w"] * layer.scale.data[:, None])
        layer.scale.data[3].fill_(5)

    recording = check_recording(Scaled, load, PARAMS)
    recording.require_coverage()
    (program,) = recording.programs
    assert set(program.targets) == {"weight", "scale"}
    assert [write.param for write in recording.writes] == ["plain"]
    assert len(program.statements) == 5


def test_what_leads_nowhere_is_left_out() -> None:
    def load(model: Scaled, pairs: Pairs) -> None:
        weights, layer = dict(pairs), model.layer
        norm = weights["w"].norm()
        value = weights["w"] + 1
        value.mul_(torch.rand_like(value))
        value = weights["w"] * 2
        layer.weight.data.copy_(value)
        value.div_(norm)

    recording = check_recording(Scaled, load, PARAMS, exempt=lambda module, param: True)
    (program,) = recording.programs
    assert [each.op for each in program.statements] == ["aten.mul.Tensor", "aten.copy_.default"]
    assert recording.ignored == ("s",)


def test_tied_places_may_be_apart_in_a_replay() -> None:
    def model(tied: bool) -> nn.Module:
        made = nn.ModuleDict({"a": nn.Linear(6, 4, bias=False), "b": nn.Linear(6, 4, bias=False)})
        if tied:
            made["b"].weight = made["a"].weight
        return made.requires_grad_(False)

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            recorded["b"].weight.data.copy_(weight.exp())

    recorded = model(tied=True)
    recording = record(recorded, load, PARAMS[:1])
    apart, weight = model(tied=False), torch.rand(4, 6)
    replay(recording, apart, fetch_from({"w": weight}))
    for name in "ab":
        assert torch.equal(apart[name].weight, weight.exp())


def test_tensors_that_are_views_of_one_memory() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
            self.lower = nn.Parameter(self.whole.data[2:], requires_grad=False)

    def load(model: Views, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.whole.data.copy_(weight)
            model.lower.data.mul_(2)

    check_recording(Views, load, PARAMS[:1]).require_coverage()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4, bias=False)
        self.b = nn.Linear(6, 4, bias=False)
        self.requires_grad_(False)


def test_one_trace_feeds_two_modules() -> None:
    def load(model: Pair, pairs: Pairs) -> None:
        for _, weight in pairs:
            scaled = weight.float() * 2
            model.a.weight.data.copy_(scaled)
            scaled += 1
            model.b.weight.data.copy_(scaled[:4].exp())

    recording = check_recording(Pair, load, [ParamMeta("w", "bfloat16", (4, 6))])
    recording.require_coverage()
    assert [program.module for program in recording.programs] == ["a", "b"]
    assert [len(program.statements) for program in recording.programs] == [3, 5]
    assert recording.bytes_pulled == 48


def test_a_slice_that_lands_in_two_parameters_is_pulled_once() -> None:
    def load(model: Pair, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.a.weight.data.copy_(weight)
            model.b.weight.data.copy_(weight.T.neg().T)

    recording = check_recording(Pair, load, [ParamMeta("w", "float32", (4, 6))])
    assert (len(recording.placements), len(recording.programs)) == (1, 1)
    assert recording.bytes_pulled == 96


def test_scales_that_are_reduced_over_several_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)

    def load(model: Scaled, pairs: Pairs) -> None:
        for number, (_, scale) in enumerate(pairs):
            param = model.scale.data
            param.copy_(torch.max(param, scale.amin()) if number else scale.amin())

    params = [ParamMeta(name, "float32", (2,)) for name in "abc"]
    recording = check_recording(Scaled, load, params)
    recording.require_coverage()
    assert recording.bytes_pulled == 24 and recording.consumed == set("abc")


def test_a_tied_tensor_is_computed_once_and_found_in_both_places() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 6)
            self.head = nn.Linear(6, 4, bias=False)
            self.head.weight = self.embed.weight
            self.requires_grad_(False)

    def load(model: Tied, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.head.weight.data.copy_(weight + 1)

    recording = check_recording(Tied, load, [ParamMeta("w", "float32", (4, 6))])
    assert [program.module for program in recording.programs] == ["embed"]
    assert recording.aliases == ((("embed", "weight"), ("head", "weight")),)
