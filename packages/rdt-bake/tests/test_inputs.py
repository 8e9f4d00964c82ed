"""Which slices a program fetches."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_bake.inputs import Inputs
from rdt_bake.origins import Source, View
from rdt_bake.replay import read_slice
from rdt_plan import ParamMeta

SOURCE = Source("w", ParamMeta("w", "float32", (6, 8)))
VALUES = torch.arange(48.0).view(6, 8)


def view_of(tensor: torch.Tensor) -> View:
    return View(SOURCE, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def pulled(*tensors: torch.Tensor) -> int:
    """Bytes of the distinct slices, each view checked against its tensor."""
    views = [view_of(tensor) for tensor in tensors]
    inputs = Inputs(views)
    slices = set()
    for view, tensor in zip(views, tensors, strict=True):
        region, offset, stride = inputs.read(view)
        packed = read_slice(VALUES, region).contiguous().clone().reshape(-1).view(torch.uint8)
        again = packed.view(tensor.dtype).as_strided(tensor.shape, stride, offset)
        assert torch.equal(again, tensor)
        slices.add(region)
    return sum(region.num_bytes for region in slices)


def test_a_view_and_its_transpose_are_one_slice() -> None:
    assert pulled(VALUES, VALUES.t(), VALUES.view(3, 16).t()) == 192


def test_repeats_are_read_once() -> None:
    assert pulled(VALUES[0].expand(4, 8), VALUES[:, :1].expand(6, 3)) == 56


def test_overlapping_slices_become_the_range_they_span_if_that_is_less() -> None:
    assert pulled(VALUES[:4], VALUES[2:]) == 192
    assert pulled(VALUES[:, 0], VALUES[:, 7]) == 48
    assert pulled(VALUES, VALUES.view(torch.int32)[1:], VALUES.view(torch.int16)[0]) == 192


def test_windows_that_overlap_themselves_are_one_range() -> None:
    assert pulled(VALUES.view(-1).unfold(0, 5, 1)) == 192


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(0, 7)] * 2), max_size=5))
def test_no_more_than_once_a_view_nor_than_the_whole(corners: list[tuple[int, ...]]) -> None:
    parts = [VALUES[min(a, b) : max(a, b) + 1, min(c, d) : max(c, d) + 1] for a, b, c, d in corners]
    assert pulled(*parts) <= min(192, sum(part.numel() * 4 for part in parts))
