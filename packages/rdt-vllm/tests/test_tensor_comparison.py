"""What the comparison of a worker's tensors finds, and what it does not let pass."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from rdt_vllm.module_tensors import own_tensors
from rdt_vllm.testing.bits import flip_byte, num_bytes
from rdt_vllm.testing.module_snapshots import ModuleSnapshots
from rdt_vllm.testing.tensor_comparison import TensorComparison, compare_filled, compare_live


class Model(nn.Module):
    """Two linear layers, one with a bias, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.first = nn.Linear(4, 6, bias=True)
        self.second = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0))


FORMS: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Embedding: ("weight",),
    nn.Linear: ("weight",),  # a bias is never taken away, only changed in place
    Model: ("table",),
}
PARAMETER_BYTES = 4 * (8 * 4 + 6 * 4 + 6 + 4 * 6 + 8 * 4)  # the shared weight in both its places


class Worker:
    """A model that was filled and packed as a CPU does it, beside an equal fresh one."""

    def __init__(self) -> None:
        self.fresh = Model()
        self.live = copy.deepcopy(self.fresh)
        self.forms = {
            id(module): {
                name: nn.Parameter(t.to("meta")) if isinstance(t, nn.Parameter) else t.to("meta")
                for name, t in own_tensors(module).items()
                if name in FORMS[type(module)]
            }
            for module in self.live.modules()
        }
        self.snapshots = ModuleSnapshots()
        for name in ("embed", "first", "second"):
            self.snapshots.observe(name, self.live.get_submodule(name))
        self.pack()

    def pack(self) -> None:
        for module in (self.live.first, self.live.second):
            module.weight = nn.Parameter(torch.empty(0))

    def compare(self, *left_alone: tuple[str, str]) -> TensorComparison:
        return compare_filled(
            self.fresh,
            self.live,
            self.snapshots,
            lambda module: self.forms[id(module)],
            left_alone,
        )


@pytest.fixture
def worker() -> Worker:
    return Worker()


def paths(comparison: TensorComparison) -> list[str]:
    return [mismatch.path for mismatch in comparison.mismatches]


def test_equal_bits_are_all_counted(worker: Worker) -> None:
    result = worker.compare()

    assert result.mismatches == []
    assert result.bytes_compared == result.bytes_expected == PARAMETER_BYTES


@pytest.mark.parametrize("param", ["embed.weight", "first.weight", "first.bias", "second.weight"])
def test_one_flipped_byte_is_found_where_it_is(worker: Worker, param: str) -> None:
    byte = flip_byte(worker.fresh.get_parameter(param))

    result = worker.compare()

    places = [param, "head.weight"] if param == "embed.weight" else [param]
    assert paths(result) == places
    assert {mismatch.first_byte for mismatch in result.mismatches} == {byte}


def test_a_module_that_was_not_filled_is_missed(worker: Worker) -> None:
    worker.snapshots.clear()
    worker.snapshots.observe("embed", worker.live.embed)

    result = worker.compare()

    assert paths(result) == ["first.weight", "first.bias", "second.weight"]
    assert result.bytes_compared < result.bytes_expected == PARAMETER_BYTES


def test_what_loading_leaves_alone_may_be_missing(worker: Worker) -> None:
    worker.snapshots.clear()
    worker.snapshots.observe("embed", worker.live.embed)
    worker.snapshots.observe("first", worker.fresh.first)

    result = worker.compare(("second", "weight"))

    assert result.mismatches == []
    assert result.bytes_compared == result.bytes_expected == PARAMETER_BYTES - 4 * 4 * 6
    assert all("not filled" in mismatch.reason for mismatch in result.mismatches)


def test_tensors_without_bytes_are_failures(worker: Worker) -> None:
    worker.snapshots.observe("first", worker.live.first)  # as it serves: packed away

    (mismatch,) = worker.compare().mismatches

    assert mismatch.path == "first.weight"
    assert "holds no bytes" in mismatch.reason


def test_a_parameter_the_worker_has_and_the_fresh_model_lacks_is_counted(worker: Worker) -> None:
    worker.fresh.second = nn.Identity()

    result = worker.compare()

    assert result.bytes_compared < result.bytes_expected


def test_a_kept_parameter_may_have_been_cast_in_place(worker: Worker) -> None:
    worker.fresh.first.bias.data = worker.fresh.first.bias.data.to(torch.bfloat16)
    cast = copy.deepcopy(worker.fresh.first)
    cast.bias.data = cast.bias.data.float()
    worker.live.first.bias.data = cast.bias.data.clone()
    worker.snapshots.observe("first", cast)

    result = worker.compare()

    assert result.mismatches == []
    assert result.bytes_compared == result.bytes_expected == PARAMETER_BYTES


def test_any_other_dtype_is_a_mismatch(worker: Worker) -> None:
    worker.fresh.second.to(torch.bfloat16)

    (mismatch,) = worker.compare().mismatches

    assert mismatch.path == "second.weight"
    assert "bfloat16" in mismatch.reason
    assert mismatch.first_byte is None


def test_serving_tensors_are_compared_but_for_those_packed_away_in_both(worker: Worker) -> None:
    for module in (worker.fresh.first, worker.fresh.second):
        module.weight = nn.Parameter(torch.empty(0))

    result = compare_live(worker.fresh, worker.live)
    assert result.mismatches == []
    assert result.bytes_compared == sum(
        num_bytes(tensor)
        for module in worker.live.modules()
        for tensor in own_tensors(module).values()
    )

    flip_byte(worker.live.table)
    worker.live.second.weight = nn.Parameter(torch.zeros(4, 6))
    assert sorted(paths(compare_live(worker.fresh, worker.live))) == ["second.weight", "table"]


def test_copies_are_the_observers_own() -> None:
    layer = nn.Linear(2, 2)
    snapshots = ModuleSnapshots()
    snapshots.observe("layer", layer)
    before = layer.weight.detach().clone()

    with torch.no_grad():
        layer.weight.zero_()

    found = snapshots.find("layer", "weight")
    assert found is not None
    assert torch.equal(found, before)
    snapshots.clear()
    assert snapshots.find("layer", "weight") is None
    assert snapshots.num_modules == 0
