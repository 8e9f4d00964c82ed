import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rdt_trainer import module_snapshot
from rdt_trainer.module_snapshot import ModuleSnapshot


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.tied = self.layers[0]
        self.norm = nn.Module()
        self.norm.register_buffer("mean", torch.zeros(2))


def snapshot(model: nn.Module) -> ModuleSnapshot:
    return ModuleSnapshot(model, list(model.parameters()))


def test_it_holds_while_only_contents_and_flags_change():
    model = Model()
    taken = snapshot(model)
    assert taken.holds()
    model.train(not model.training).requires_grad_(False)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.count):
            tensor.add_(1)
    model.layers[1].weight.grad = torch.ones(3, 3)
    assert taken.holds()
    assert taken.holds()


def replaced_table(model: Model) -> None:
    linear = model.layers[1]
    linear._parameters = {name: nn.Parameter(p.detach()) for name, p in linear.named_parameters()}


def swapped_names(model: Model) -> None:
    table = model.layers[1]._parameters
    table["weight"], table["bias"] = table["bias"], table["weight"]


def replaced(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        tensor = getattr(model, name).clone()
        setattr(model, name, nn.Parameter(tensor.detach()) if name == "one" else tensor)

    return change


def with_data(data: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.layers[1].weight.data = data(model.layers[1].weight.data)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "one", nn.Parameter(torch.ones(1))),  # an equal one
        lambda model: setattr(model, "count", torch.zeros(2)),
        lambda model: setattr(model, "more", nn.Parameter(torch.ones(1))),
        lambda model: setattr(model, "more", nn.Identity()),
        lambda model: delattr(model, "one"),
        lambda model: setattr(model, "one", None),
        lambda model: model._parameters.update(uno=model._parameters.pop("one")),
        lambda model: model._modules.update(bound=model._modules.pop("tied")),
        lambda model: setattr(model, "tied", model.layers[1]),
        lambda model: model.layers.__setitem__(2, nn.Linear(3, 3)),
        lambda model: model._non_persistent_buffers_set.clear(),
        lambda model: model.layers[1].register_buffer("more", torch.zeros(2)),
        lambda model: model.norm._non_persistent_buffers_set.add("mean"),
        replaced_table,
        swapped_names,
        with_data(torch.clone),
        with_data(lambda data: data[:2]),
        with_data(lambda data: data.t()),
        with_data(lambda data: data.view(torch.int32).view(torch.float32).flatten()),
        lambda model: model.layers[1].weight.requires_grad_(False).set_(torch.zeros(3, 3)),
        lambda model: setattr(model.layers[1], "weight", nn.Parameter(model.layers[1].weight.data)),
        lambda model: model.to(torch.bfloat16),
    ],
)
def test_it_does_not_hold_once_something_is_another_thing(change):
    model = Model()
    taken = snapshot(model)
    change(model)
    assert not taken.holds()
    assert snapshot(model).holds()


def test_the_table_that_was_there_before_holds_again():
    model = Model()
    taken = snapshot(model)
    before = model.layers[1]._parameters
    replaced_table(model)
    assert not taken.holds()
    model.layers[1]._parameters = before
    assert taken.holds()


def test_a_module_in_the_place_of_a_freed_one_counts():
    """The place in memory, too: an id says nothing of what is gone."""
    model = Model()
    taken = snapshot(model)
    for _ in range(100):
        model.layers[1] = nn.Linear(3, 3)
        assert not taken.holds()


def test_others_run_while_it_looks():
    """A thread that wants the interpreter gets it between two parts, however many there are."""
    module_snapshot._PART, before = 1, module_snapshot._PART
    turns, started, ended = [0], threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    try:
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
        taken = snapshot(model)
        other = threading.Thread(target=run)
        other.start()
        started.wait()
        before_look = turns[0]
        assert taken.holds()
        assert turns[0] - before_look > 50
    finally:
        ended.set()
        module_snapshot._PART = before
    other.join()


def test_the_same_is_seen_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones where that is asked for."""
    model = nn.ModuleList(nn.Linear(2, 3) for _ in range(50))
    taken = snapshot(model)
    for size in (1, 7, 64):
        monkeypatch.setattr(module_snapshot, "_PART", size)
        with module_snapshot.gentle_looks(size != 7):
            assert taken.holds()
        model[size % 50].weight, before = model[0].bias, model[size % 50].weight
        assert not taken.holds()
        model[size % 50].weight = before
        assert taken.holds()


def test_a_module_that_computes_one_of_its_tables_is_looked_at():
    class Counting(nn.Module):
        @property
        def _buffers(self) -> dict[str, torch.Tensor]:
            return self.__dict__["counts"]

        @_buffers.setter
        def _buffers(self, given: dict[str, torch.Tensor]) -> None:
            self.__dict__["counts"] = given

    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    taken = snapshot(model)
    assert taken.holds()
    model[0].__dict__["counts"]["calls"] = torch.zeros(1)
    assert not taken.holds()


def test_the_collector_does_not_run_meanwhile():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(2000))
    taken = snapshot(model)
    runs: list[str] = []

    def note(phase: str, _: object) -> None:
        """Once it is on again it may run at once."""
        frame = sys._getframe(1)
        if frame.f_code.co_filename == module_snapshot.__file__:
            runs.append(f"{phase} in {frame.f_code.co_name}")

    gc.callbacks.append(note)
    try:
        assert taken.holds()
    finally:
        gc.callbacks.remove(note)
    assert runs == []
    assert gc.isenabled()


def test_a_parameter_that_moves_to_the_next_module_counts():
    """One walk after another meets the same names and tensors in the same order."""
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    model.first.a, model.first.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    model.second.c = nn.Parameter(torch.ones(1))
    taken = snapshot(model)
    assert taken.holds()
    moved = model.first._parameters.pop("b")
    model.second._parameters = {"b": moved, **model.second._parameters}
    assert not taken.holds()


def test_a_dtype_counts_where_address_and_shape_stay():
    model = nn.Linear(3, 3, bias=False).requires_grad_(False)
    taken = snapshot(model)
    model.weight.data = model.weight.data.view(torch.int32)
    assert not taken.holds()


def test_a_module_that_contains_itself_is_walked_once():
    model = Model()
    object.__setattr__(model, "_modules", {**model._modules, "again": model})
    assert snapshot(model).holds()


def test_it_keeps_no_tensor_alive_but_those_that_it_watches():
    model = Model()
    taken = ModuleSnapshot(model, [model.one])
    old = weakref.ref(model.count)
    model.count = torch.zeros(2)
    gc.collect()
    assert old() is None and not taken.holds()
