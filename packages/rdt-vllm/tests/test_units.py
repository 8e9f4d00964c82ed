"""Which modules go together, and which of them live: whatever a verdict says, memory is shared."""

from typing import Any

import pytest
import torch
from torch import nn

from rdt_bake import Recording
from rdt_plan import Placement, Slice
from rdt_vllm.errors import UnsupportedError
from rdt_vllm.layerwise import LayerwiseUnit
from rdt_vllm.live import LiveUnit
from rdt_vllm.units import InstallUnits

pytestmark = pytest.mark.engine


class Verdicts:
    """A probe that has been told."""

    def __init__(self, *obstructed: str) -> None:
        self._obstructed = obstructed

    def obstacle(self, path: str, module: nn.Module) -> str | None:
        return "packed" if path in self._obstructed else None


def recording_of(*places: str) -> Recording:
    """Of loaders that write the weights of these modules, 3 x 4 each."""
    writes = []
    for path in places:
        slice_ = Slice(path, "float32", 0, (12,), (1,))
        writes.append(Placement(slice_, path, "weight", 0, (12,), (1,), "float32", (1,)))
    return Recording(tuple(writes), frozenset(places), (), (), ())


def model_of(**modules: Any) -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = nn.ModuleDict(modules or {name: nn.Linear(4, 3, bias=False) for name in "abcd"})
    model.requires_grad_(False)
    record_metadata_for_reloading(model)
    return model


def units_of(model: Any, *obstructed: str, written: str = "abc") -> InstallUnits:
    probe: Any = Verdicts(*obstructed)
    return InstallUnits(model, recording_of(*written), probe)


def live(units: InstallUnits) -> set[str]:
    assert all(isinstance(u, LiveUnit if u.is_live else LayerwiseUnit) for u in units.all)
    return {path for path, unit in units.of.items() if unit.is_live}


def test_modules_go_their_own_ways() -> None:
    model = model_of()
    units = units_of(model, "b")

    assert live(units) == {"a", "c"}
    assert units.obstacles == {"b": "packed"}
    assert len(units.all) == 3
    assert units.live_tensors().keys() == {("a", "weight"), ("c", "weight")}
    assert units.live_tensors()["a", "weight"] is model["a"].weight
    assert "2 modules (96 bytes) live, 1 layerwise (1 as packed)" in units.summary()


def test_without_a_probe_nothing_is_live() -> None:
    units = InstallUnits(model_of(), recording_of("a"), None)
    assert not live(units)
    assert not units.live_tensors()


@pytest.mark.parametrize("obstructed", ["", "a", "d"])
def test_tied_modules_are_live_together_or_not_at_all(obstructed: str) -> None:
    """``d`` is not written, but what it reads is."""
    model = model_of()
    model["d"].weight = model["a"].weight

    units = units_of(model, obstructed)

    assert units.of["a"] is units.of["d"]
    assert live(units) == ({"b", "c"} if obstructed else {"a", "b", "c", "d"})


def test_what_vllm_never_moves_is_there_while_a_unit_is_open_also_when_it_came_later() -> None:
    model = model_of()
    unit, module, weight = units_of(model, "a").of["a"], model["a"], model["a"].weight
    for late in ("_expert_map", "late"):  # the other it takes away
        module.register_buffer(late, torch.arange(3), persistent=False)
    expert_map = module._buffers["_expert_map"]

    for _ in range(2):
        unit.open()
        assert list(module._buffers) == ["_expert_map"]
        assert module._buffers["_expert_map"] is expert_map
        assert unit.destination("a", "weight") is module.weight is not weight
        unit.abandon()
        assert list(module._buffers) == ["_expert_map", "late"]
        assert module.weight is weight


def test_memory_that_overlaps_is_no_tie_and_yet_holds_both_back() -> None:
    model = model_of()
    model["b"].weight = nn.Parameter(model["a"].weight.data.view(4, 3), requires_grad=False)

    assert live(units_of(model)) == {"a", "b", "c"}
    units = units_of(model, "a")
    assert live(units) == {"c"}
    assert units.obstacles["b"] == "memory is shared with a"


class Owner(nn.Module):
    """Shows its child's weight otherwise shaped."""

    def __init__(self, child: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))
        self.child = child
        self.register_buffer("shown", child.weight.data.view(12), persistent=False)


@pytest.mark.parametrize(
    ("obstructed", "expected"), [((), {"o", "o.child"}), (("o",), set()), (("o.child",), set())]
)
def test_a_buffer_that_shows_a_parameter_is_live_with_it(
    obstructed: tuple[str, ...], expected: set[str]
) -> None:
    model = model_of(o=Owner(nn.Linear(4, 3, bias=False)))
    probe: Any = Verdicts(*obstructed)
    assert live(InstallUnits(model, recording_of("o", "o.child"), probe)) == expected


def test_a_buffer_that_shows_what_a_parameter_was_keeps_both_back() -> None:
    model = model_of(o=Owner(nn.Linear(4, 3, bias=False)))
    model["o"].child.weight = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    probe: Any = Verdicts()

    units = InstallUnits(model, recording_of("o", "o.child"), probe)

    assert not live(units)
    assert "shown shows what weight was" in units.obstacles["o.child"]


def test_a_module_under_another_name_or_none_is_refused() -> None:
    model = model_of()
    model["z"] = model["a"]
    with pytest.raises(UnsupportedError, match="'a' under another name"):
        units_of(model, written="z")
    with pytest.raises(UnsupportedError, match="'y', which this model lacks"):
        units_of(model, written="y")
