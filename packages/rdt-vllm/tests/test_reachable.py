import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rdt_vllm import reachable
from rdt_vllm.errors import ProbeError
from rdt_vllm.reachable import ReachableState


class Part:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def method(self) -> None:
        pass


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.flag, self.scale = True, torch.ones(2)
        self.neighbour = [nn.Linear(2, 2)]
        self.kernel = Part(experts=Part(packed=torch.ones(3), order=[1, 2]), table={"a": 1})
        self.run = closing_over(Part(handle=torch.zeros(2)))
        self.bound = Part(calls=0).method
        self.partial = functools.partial(print, Part(calls=0))
        self.plain: Callable[[], Any] = lambda: 1


def inside(function: Callable[..., Any]) -> Any:
    return function.__closure__[0].cell_contents  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Any], object]] = {
    "flag": lambda layer: setattr(layer, "flag", False),
    "added": lambda layer: setattr(layer, "added", 1),
    "neighbour[0]._parameters[weight]": lambda layer: layer.neighbour[0].weight.data.zero_(),
    "neighbour[0]._parameters.weight": lambda layer: setattr(
        layer.neighbour[0], "weight", nn.Parameter(torch.ones(2, 2))
    ),
    "scale": lambda layer: layer.scale.zero_(),
    "kernel.experts.packed": lambda layer: layer.kernel.experts.packed.view(3).add_(1),
    "kernel.experts.order": lambda layer: layer.kernel.experts.order.reverse(),
    "kernel.table.b": lambda layer: layer.kernel.table.update(b=2),
    "run": lambda layer: setattr(layer, "run", closing_over(1)),
    "run().handle": lambda layer: inside(layer.run).handle.fill_(1),
    "bound.calls": lambda layer: setattr(layer.bound.__self__, "calls", 1),
    "partial.calls": lambda layer: setattr(layer.partial.args[0], "calls", 1),
    "plain": lambda layer: setattr(layer, "plain", lambda: 2),
    "kernel": lambda layer: setattr(layer, "kernel", Part(table={"a": 1})),
}


@pytest.mark.parametrize("path", CHANGES)
def test_each_change_is_seen_and_undone(path: str) -> None:
    layer = Layer()
    state = ReachableState(layer)
    assert state.changes() is None

    CHANGES[path](layer)

    assert str(state.changes()).replace("'", "") == path
    state.put_back()
    assert state.changes() is None
    assert ReachableState(layer).changes() is None


def test_what_is_made_anew_and_holds_the_same_is_no_change() -> None:
    layer = Layer()
    layer.plain, layer.settings = _plain(), Part(width=2, scales=[layer.scale, {"a": 1.5}])
    state = ReachableState(layer)

    layer.scale = layer.scale.clone()
    layer.plain = _plain()
    layer.settings = Part(width=2, scales=[torch.ones(2), {"a": 1.5}])
    assert state.changes() is None

    for other in (Part(width=3), Part(width=2, scales=[torch.zeros(2), {"a": 1.5}]), object()):
        layer.settings = other
        assert state.changes() == "settings"


def _plain() -> Callable[[], int]:
    return lambda: 1


def test_the_modules_own_tensors_are_somebody_elses_business() -> None:
    layer = Layer()
    state = ReachableState(layer)
    layer.weight.data.zero_()
    layer.weight = nn.Parameter(torch.zeros(5))
    assert state.changes() is None

    layer.kernel.weight = layer.weight  # but what else leads to one is watched
    state = ReachableState(layer)
    layer.weight.data.fill_(7)
    assert state.changes() == "kernel.weight"


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "MAX_TENSOR_BYTES", 8)
    with pytest.raises(ProbeError, match="8 bytes"):
        ReachableState(Layer())
    monkeypatch.undo()
    monkeypatch.setattr(reachable, "MAX_HOLDERS", 2)
    with pytest.raises(ProbeError, match="2 objects"):
        ReachableState(Layer())
