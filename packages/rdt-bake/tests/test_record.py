"""What a recording says, and what `record` refuses."""

import gc
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import (
    CoverageError,
    OverlapError,
    RecordError,
    UnsupportedTensorError,
    apply_placement,
    fetch_from,
    record,
    replay,
)
from rdt_bake.testing import check_recording, differing_places, random_weights
from rdt_plan import Fill, ParamMeta, Placement, Slice

Pairs = Iterable[tuple[str, Tensor]]


class Holder(nn.Module):
    """One parameter of a given geometry."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def test_the_comparison_itself_sees_one_flipped_bit() -> None:
    meta = ParamMeta("w", "float32", (2, 2))
    models = []
    recording = None
    for _ in range(2):
        model = Holder((2, 2))
        recording = record(
            model, lambda pairs, m=model: [m.weight.data.copy_(w) for _, w in pairs], [meta]
        )
        replay(recording, model, fetch_from(random_weights([meta])))
        models.append(model)
    assert differing_places(*models) == []
    models[0].weight.data.view(torch.int32)[1, 1] ^= 1
    assert differing_places(*models) == ["weight"]


def test_writes_say_where_everything_lands() -> None:
    model = Holder((4, 6), torch.bfloat16)

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data[1:3].copy_(weight.t()[:, :6])
            model.weight.data[3].fill_(2)

    recording = record(model, load, [ParamMeta("w", "float32", (8, 2))])
    assert recording.writes == (
        Placement(
            Slice("w", "float32", 0, (12,), (1,)),
            "",
            "weight",
            offset=6,
            shape=(6, 2),
            stride=(1, 6),
            dtype="bfloat16",
            source_stride=(2, 1),
        ),
        Fill("", "weight", 18, (6,), (1,), "bfloat16", 2.0),
    )
    (lacking,) = recording.uncovered
    assert (lacking.num_missing, lacking.bounds) == (6, ((0, 1), (0, 6)))
    with pytest.raises(CoverageError, match=r"weight \(4x6\): 6 elements missing within \[0:1"):
        recording.require_coverage()


def test_a_broadcast_copy_pulls_the_elements_once() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.copy_(weight[:3])

    recording = check_recording(lambda: Holder((5, 3)), load, [ParamMeta("w", "float32", (8,))])
    (write,) = recording.placements
    assert (write.slice.shape, write.source_stride) == ((3,), (0, 1))


def test_two_names_for_one_region_last_wins() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.copy_(weight)

    metas = [ParamMeta(name, "float32", (3,)) for name in ("first", "second", "unread")]

    def load_two(model: Holder, pairs: Pairs) -> None:
        load(model, (pair for pair in pairs if pair[0] != "unread"))

    recording = check_recording(lambda: Holder((3,)), load_two, metas)
    assert [write.slice.name for write in recording.placements] == ["second"]
    assert recording.consumed == {"first", "second"}
    assert recording.ignored == ("unread",)


def test_weights_may_be_stashed_and_copied_later() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        held = {name: weight for name, weight in pairs}
        model.weight.data[:3].copy_(held["b"][3:])
        model.weight.data[3:].copy_(held["a"][:3])

    metas = [ParamMeta(name, "int16", (6,)) for name in ("a", "b")]
    recording = check_recording(lambda: Holder((6,), torch.int16), load, metas)
    assert {(write.slice.name, write.slice.offset) for write in recording.placements} == {
        ("b", 3),
        ("a", 0),
    }


def test_only_landed_elements_of_a_copy_are_pulled() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.copy_(weight.t().contiguous().chunk(4)[1].reshape(-1)[2:6])

    recording = check_recording(
        lambda: Holder((4,), torch.int8), load, [ParamMeta("w", "int8", (16, 8))]
    )
    (write,) = recording.placements
    assert recording.bytes_pulled == 4 and write.slice.offset == 2 * 8 + 2


def test_ids_of_freed_storages_are_not_mistaken() -> None:
    """Copies that the loader drops at once would free their storages, whose ids come again."""

    def load(model: Holder, pairs: Pairs) -> None:
        for which, (_, weight) in enumerate(pairs):
            model.weight.data[which].copy_(weight.t().contiguous())

    metas = [ParamMeta(f"w{n}", "int32", (3, 2)) for n in range(200)]
    check_recording(lambda: Holder((200, 2, 3), torch.int32), load, metas)


def test_a_generator_that_the_loader_returns_is_run() -> None:
    def load(model: Holder, pairs: Pairs):
        for name, weight in pairs:
            model.weight.data.copy_(weight)
            yield name

    model = Holder((2,))
    recording = record(model, lambda pairs: load(model, pairs), [ParamMeta("w", "float32", (2,))])
    assert len(recording.writes) == 1


def test_a_loaders_own_error_comes_through_with_the_weights_name() -> None:
    model = Holder((2,))

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.copy_(weight)

    with pytest.raises(RuntimeError) as caught:
        record(model, load, [ParamMeta("w", "float32", (3,))])
    assert "'w'" in caught.value.__notes__[0]


@pytest.mark.parametrize("dtype, message", [("float99", "no dtype"), ("Tensor", "no dtype")])
def test_unknown_dtypes_are_refused(dtype: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        record(Holder((2,)), lambda pairs: None, [ParamMeta("w", dtype, (2,))])


def test_a_weight_listed_twice_is_refused() -> None:
    with pytest.raises(RecordError, match=r"'w'.*twice"):
        record(Holder((2,)), lambda pairs: None, [ParamMeta("w", "int8", (2,))] * 2)


def test_overlaps_that_cannot_be_resolved_name_both_weights() -> None:
    """A scattering of elements of ``a`` survives under a copy that is no union of few boxes."""
    model = Holder((210,), torch.int8)

    def load(pairs: Pairs) -> None:
        a, b = (weight for _, weight in pairs)
        model.weight.data[::2].copy_(a)
        model.weight.data[::3].copy_(b)

    metas = [ParamMeta("a", "int8", (105,)), ParamMeta("b", "int8", (70,))]
    with pytest.raises(OverlapError, match="'b' overwrites part of weight 'a'") as caught:
        record(model, load, metas)
    assert caught.value.weight == "a" and caught.value.param == "weight"


def test_a_destination_viewed_as_another_dtype() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        (_, codes), (_, scales) = pairs
        model.weight.data[:, :4].copy_(codes)
        model.weight.data[:, 4:].view(torch.bfloat16).copy_(scales)

    metas = [ParamMeta("codes", "uint8", (3, 4)), ParamMeta("scales", "float32", (3, 2))]
    recording = check_recording(lambda: Holder((3, 8), torch.uint8), load, metas)
    assert recording.uncovered == ()
    assert [write.dtype for write in recording.placements] == ["uint8", "bfloat16"]


def test_placements_hold_for_destinations_inside_larger_storages() -> None:
    """A slice of a recording lands the same in a parameter that is itself a strided view."""
    model = Holder((3, 4))
    recording = record(
        model,
        lambda pairs: [model.weight.data[1:].copy_(w) for _, w in pairs],
        [ParamMeta("w", "float32", (2, 4))],
        exempt=lambda *_: True,
    )
    (write,) = recording.placements
    weights = random_weights([ParamMeta("w", "float32", (2, 4))])
    pool = torch.zeros(5, 4)
    apply_placement(write, weights["w"].view(-1).view(torch.uint8), pool[1:4])
    assert torch.equal(pool[2:4], weights["w"])
    assert torch.count_nonzero(pool[:2]) == 0 and torch.count_nonzero(pool[4:]) == 0


def test_overlaps_of_different_dtypes() -> None:
    """Bytes under larger elements can be cut; elements under single bytes cannot."""
    metas = [ParamMeta("codes", "uint8", (16,)), ParamMeta("scales", "float32", (2,))]

    def load(model: Holder, pairs: Pairs, start: int, codes_first: bool) -> None:
        (_, codes), (_, scales) = pairs
        steps = [
            lambda: model.weight.data[start:].copy_(codes[start:]),
            lambda: model.weight.data[:8].view(torch.float32).copy_(scales),
        ]
        for step in steps if codes_first else reversed(steps):
            step()

    def make() -> Holder:
        return Holder((16,), torch.uint8)

    for start, codes_first in ((8, True), (8, False), (3, True), (0, False)):
        check_recording(
            make,
            lambda m, pairs, a=start, b=codes_first: load(m, pairs, a, b),
            metas,
            exempt=lambda *_: True,
        )
    model = make()
    with pytest.raises(OverlapError, match="'codes' overwrites part of weight 'scales'"):
        record(model, lambda pairs: load(model, pairs, 3, False), metas)


def test_a_write_that_leaves_its_tensor_is_refused() -> None:
    model = nn.Module()
    pool = torch.zeros(4, 4)
    model.left = nn.Parameter(pool[:, :2], requires_grad=False)
    model.right = nn.Parameter(pool[:, 2:], requires_grad=False)

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.left.data.as_strided((4, 4), (4, 1), 0).copy_(weight)

    with pytest.raises(UnsupportedTensorError, match="leaves the tensor"):
        record(model, load, [ParamMeta("w", "float32", (4, 4))])


def test_a_view_that_starts_amid_an_element_is_refused() -> None:
    model = nn.Module()
    pool = torch.zeros(12, dtype=torch.uint8)
    model.weight = nn.Parameter(pool[2:], requires_grad=False)

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data[2:].view(torch.float32).copy_(weight)

    with pytest.raises(UnsupportedTensorError, match="whole element"):
        record(model, load, [ParamMeta("w", "float32", (2,))])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_rests_and_is_left_as_found(enabled: bool, fails: bool) -> None:
    model, seen = Holder((2, 2)), []

    def load(pairs: Pairs) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise KeyError("w")

    found = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError) if fails else nullcontext():
            record(model, load, [])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if found else gc.disable)()
    assert seen == [False]


def test_equal_geometries_are_one_object() -> None:
    """A model has few, and what compares and hashes writes is quick when they are shared."""
    model = Holder((6, 4))

    def load(pairs: Pairs) -> None:
        for row, (_, weight) in enumerate(pairs):
            model.weight.data.narrow(0, row, 1).copy_(weight.narrow(0, 1, 1))

    metas = [ParamMeta(f"w{number}", "float32", (3, 4)) for number in range(6)]
    writes = record(model, load, metas).placements
    assert [write.offset for write in writes] == [0, 4, 8, 12, 16, 20]
    assert len({id(write.slice.shape) for write in writes}) == 1
    assert len({id(write.stride) for write in writes}) == 1
