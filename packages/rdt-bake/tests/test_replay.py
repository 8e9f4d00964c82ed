import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake import (
    ReplayError,
    apply_fill,
    apply_placement,
    fetch_from,
    find_tensor,
    read_slice,
    record,
    replay,
)
from rdt_bake.testing import check_recording, random_weights
from rdt_plan import ITEM_BYTES, Fill, ParamMeta, Placement, Slice, canonical


def packed(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def place(shape: tuple[int, ...], stride: tuple[int, ...], **changes: object) -> Placement:
    """A whole slice of float32 elements into ``m.w``; ``changes`` replaces fields."""
    fields: dict = {
        "slice": Slice("x", "float32", 0, (torch.Size(shape).numel(),), (1,)),
        "module": "m",
        "param": "w",
        "offset": 0,
        "shape": shape,
        "stride": stride,
        "dtype": "float32",
        "source_stride": tuple(torch.empty(shape, device="meta").stride()),
    }
    return Placement(**(fields | changes))


@given(st.sampled_from(sorted(ITEM_BYTES)), st.data())
def test_equal_dtypes_keep_every_bit(dtype: str, data: st.DataObject) -> None:
    """Also bit patterns that are no value: bools of 2, signalling NaNs."""
    item = ITEM_BYTES[dtype]
    bits = data.draw(st.binary(min_size=6 * item, max_size=6 * item))
    source = torch.tensor(list(bits), dtype=torch.uint8)
    destination = torch.zeros(6 * item + 2 * item, dtype=torch.uint8).view(getattr(torch, dtype))
    piece = Slice("x", dtype, 0, (6,), (1,))
    write = place((2, 3), (3, 1), slice=piece, offset=1, dtype=dtype, source_stride=(1, 2))
    apply_placement(write, source, destination)
    landed = destination.view(torch.uint8).view(8, item)
    expected = source.view(3, 2, item).transpose(0, 1).reshape(6, item)
    assert torch.equal(landed[1:7], expected)
    assert not landed[0].any() and not landed[7].any()


def test_scalars_and_empty_slices() -> None:
    destination = torch.zeros(())
    write = place((), (), slice=Slice("x", "float32", 0, (), ()))
    apply_placement(write, packed(torch.tensor(3.0)), destination)
    assert destination.item() == 3
    nothing = place((0,), (1,), slice=Slice("x", "float32", 0, (0,), (1,)), source_stride=(1,))
    apply_placement(nothing, torch.empty(0, dtype=torch.uint8), torch.zeros(0))
    apply_fill(Fill("m", "w", 0, (0, 3), (3, 1), "float32", 1.0), torch.zeros(0, 3))


def test_a_broadcast_and_a_cast() -> None:
    destination = torch.zeros(3, 2, dtype=torch.bfloat16)
    write = place(
        (3, 2),
        (2, 1),
        slice=Slice("x", "float32", 0, (2,), (1,)),
        dtype="bfloat16",
        source_stride=(0, 1),
    )
    values = torch.tensor([0.1, 300.7])
    apply_placement(write, packed(values), destination)
    assert torch.equal(destination, values.bfloat16().expand(3, 2))


def test_destinations_that_are_views_parameters_or_of_other_dtypes() -> None:
    pool = torch.zeros(4, 6)
    row = nn.Parameter(pool[1:3, ::2])
    apply_placement(place((3,), (2,), offset=6), packed(torch.ones(3)), row)
    assert pool[2].tolist() == [1, 0, 1, 0, 1, 0] and pool.sum() == 3
    words = torch.zeros(8, dtype=torch.uint8)
    apply_placement(place((1,), (1,), offset=1), packed(torch.ones(1)), words)
    assert words.view(torch.float32).tolist() == [0, 1]


def test_packed_bytes_at_an_odd_address() -> None:
    chunk = torch.zeros(9, dtype=torch.uint8)
    chunk[1:] = packed(torch.tensor([1.0, 2.0]))
    destination = torch.zeros(2)
    apply_placement(place((2,), (1,)), chunk[1:], destination)
    assert destination.tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(st.sampled_from(sorted(ITEM_BYTES)), st.integers(0, 17), st.data())
def test_sources_of_any_alignment_and_length(dtype: str, start: int, data: st.DataObject) -> None:
    item = ITEM_BYTES[dtype]
    offset, extents = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([(3,), (2, 2), ()]))
    steps = {(3,): (2,), (2, 2): (3, 1), (): ()}[extents]
    region = Slice("w", dtype, offset, extents, steps)
    reach = 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True))
    num_bytes = (offset + reach) * item + data.draw(st.integers(0, 17))
    held = torch.arange(7, 7 + start + num_bytes, dtype=torch.uint8)
    source = held[start:]
    packed_source = source[: num_bytes // item * item].view(-1, item)
    at = torch.arange(num_bytes // item).as_strided(extents, steps, offset).reshape(-1)
    for found in (read_slice(source, region), fetch_from({"w": source})(region)):
        assert found.dtype == getattr(torch, dtype) and found.shape == extents
        assert found.stride() == steps
        # By memory: a copy of bools would normalise them.
        landed = torch.empty(0, dtype=torch.uint8).set_(
            found.untyped_storage(),
            found.storage_offset() * item,
            (*extents, item),
            (*(step * item for step in steps), 1),
        )
        assert torch.equal(landed.reshape(-1), packed_source[at].reshape(-1))
    with pytest.raises(ReplayError, match=f"holds {num_bytes} bytes"):
        read_slice(source, Slice("w", dtype, num_bytes // item, (1,), (1,)))


def test_a_source_that_starts_at_an_odd_byte() -> None:
    source = torch.arange(9, dtype=torch.uint8)[1:]
    found = read_slice(source, canonical("w", "float32", 0, (2,), (1,)))
    assert found.view(torch.uint8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    nothing = read_slice(source, canonical("w", "float32", 0, (0,), (1,)))
    assert nothing.shape == (0,) and nothing.dtype == torch.float32


def test_a_loader_that_views_part_of_an_odd_length() -> None:
    def make() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.zeros(1), requires_grad=False)])

    def load(model: nn.Module, pairs) -> None:
        for _, weight in pairs:
            model[0].copy_(weight[:4].view(torch.float32))

    recording = check_recording(make, load, [ParamMeta("w", "uint8", (5,))])
    model = make()
    replay(recording, model, fetch_from({"w": torch.arange(6, dtype=torch.uint8)[1:]}))
    assert model[0].view(torch.uint8).tolist() == [1, 2, 3, 4]


def test_conjugated_sources_are_read_by_value() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    found = read_slice(values.conj(), Slice("w", "complex64", 0, (2,), (1,)))
    assert found.tolist() == [1 - 2j, 3 + 4j]


def test_a_destination_that_starts_at_an_odd_byte_is_refused() -> None:
    destination = torch.zeros(9, dtype=torch.uint8)[1:]
    with pytest.raises(ReplayError, match=r"m\.w: it starts at byte 1 .* multiple of the 4 bytes"):
        apply_placement(place((2,), (1,)), packed(torch.ones(2)), destination)
    with pytest.raises(ReplayError, match=r"m\.w: it starts at byte 1 "):
        apply_fill(Fill("m", "w", 0, (2,), (1,), "float32", 1.0), destination)
    assert not destination.any()


def test_misfits_are_refused_by_name() -> None:
    write = place((2, 3), (3, 1))
    with pytest.raises(ReplayError, match=r"'x' for m\.w: expected 24 bytes.*found 20"):
        apply_placement(write, torch.zeros(20, dtype=torch.uint8), torch.zeros(2, 3))
    with pytest.raises(ReplayError, match=r"expected 24 bytes of uint8, found 24 of torch\.int8"):
        apply_placement(write, torch.zeros(24, dtype=torch.int8), torch.zeros(2, 3))
    with pytest.raises(ReplayError, match=r"m\.w: the region ends at byte 24, found 20"):
        apply_placement(write, torch.zeros(24, dtype=torch.uint8), torch.zeros(5))
    with pytest.raises(ReplayError, match=r"m\.w: the region ends at byte"):
        apply_fill(Fill("m", "w", 4, (2,), (1,), "float32", 0.0), torch.zeros(5))
    with pytest.raises(ReplayError, match="not contiguous"):
        read_slice(torch.zeros(2, 3).t(), write.slice)
    with pytest.raises(ReplayError, match="holds 20 bytes"):
        read_slice(torch.zeros(5), write.slice)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "bool", "int64"])
def test_fills_of_every_kind_of_dtype(dtype: str) -> None:
    destination = torch.zeros(4, dtype=torch.uint8).repeat(8).view(getattr(torch, dtype))
    apply_fill(Fill("m", "w", 1, (2,), (1,), dtype, 1), destination)
    one = torch.ones(1).to(getattr(torch, dtype)).view(torch.uint8)
    landed = destination.view(torch.uint8).view(-1, len(one))
    assert torch.equal(landed[1:3], one.expand(2, -1))
    assert not landed[0].any() and not landed[3:].any()


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.caches = [torch.zeros(2), {"not": "a tensor"}]
        self.tables = {"k": torch.zeros(2), 1: torch.zeros(2)}
        if tied:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_places_are_all_written(tied: bool) -> None:
    """An installer may have untied what the recorded model tied."""
    model = Tied(True)

    def load(pairs) -> None:
        for _, weight in pairs:
            model.embed.weight.copy_(weight)
            model.caches[0].copy_(weight[0])
            model.tables["k"].copy_(weight[1])
            model.tables[1].copy_(weight[2])

    params = [ParamMeta("w", "float32", (3, 2))]
    recording = record(model, load, params)
    other = Tied(tied)
    weights = random_weights(params)
    replay(recording, other, fetch_from(weights))
    assert torch.equal(other.embed.weight, weights["w"])
    assert torch.equal(other.head.weight, weights["w"])
    held = torch.stack([other.caches[0], other.tables["k"], other.tables[1]])
    assert torch.equal(held, weights["w"])


def test_each_distinct_slice_is_fetched_once() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(4), False) for _ in range(3)])
    params = [ParamMeta("w", "float32", (8,))]
    recording = record(
        model, lambda pairs: [p.data.copy_(w[:4]) for _, w in pairs for p in model], params
    )
    weights, asked = random_weights(params), []

    def fetch(piece: Slice) -> Tensor:
        asked.append(piece)
        return read_slice(weights["w"], piece)

    replay(recording, model, fetch)
    assert asked == [Slice("w", "float32", 0, (4,), (1,))]
    assert all(torch.equal(param, weights["w"][:4]) for param in model)


def test_places_that_are_not_there() -> None:
    model = Tied(False)
    assert find_tensor(model, "", "tables['k']") is model.tables["k"]
    absent = [("nowhere", "w"), ("embed", "bias"), ("", "caches[1]"), ("", "caches[7]")]
    for module, param in absent:
        with pytest.raises(ReplayError, match=module or param.split("[")[0]):
            find_tensor(model, module, param)
