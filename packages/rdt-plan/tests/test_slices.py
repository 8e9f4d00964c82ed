import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ParamMeta, Slice, SliceError, canonical, check_bounds, contiguous_stride, whole
from rdt_plan.slices import last_element
from rdt_plan.testing import elements, pack_slice, param_metas, regions, slices

SHAPES = st.lists(st.sampled_from((1, 1, 2, 3, 4)), max_size=4).map(tuple)


@st.composite
def shaped_regions(draw):
    shape = draw(SHAPES)
    return shape, *draw(regions(shape))


@given(shaped_regions())
def test_canonical_keeps_the_elements_and_their_order(region) -> None:
    shape, offset, stride = region
    slice_ = canonical("w", "int8", offset, shape, stride)
    assert list(elements(slice_.offset, slice_.shape, slice_.stride)) == list(
        elements(offset, shape, stride)
    )
    assert last_element(offset, shape, stride) == max(elements(offset, shape, stride))
    assert canonical("w", "int8", slice_.offset, slice_.shape, slice_.stride) == slice_


@given(shaped_regions(), st.data())
def test_regions_of_equal_elements_in_equal_order_are_equal_keys(region, data) -> None:
    shape, offset, stride = region
    slice_ = canonical("w", "int8", offset, shape, stride)
    spelled, steps = list(shape), list(stride)
    for dim in reversed(range(len(shape))):
        for divisor in (2, 3):
            if spelled[dim] % divisor == 0 and data.draw(st.booleans()):
                spelled[dim : dim + 1] = [spelled[dim] // divisor, divisor]
                steps[dim : dim + 1] = [steps[dim] * divisor, steps[dim]]
        if data.draw(st.booleans()):
            spelled.insert(dim, 1)
            steps.insert(dim, data.draw(st.integers(0, 99)))
    assert canonical("w", "int8", offset, spelled, steps) == slice_


def test_canonical_examples() -> None:
    assert canonical("w", "int8", 5, (), ()) == Slice("w", "int8", 5, (), ())
    assert canonical("w", "int8", 5, (1, 1), (0, 7)) == Slice("w", "int8", 5, (), ())
    assert canonical("w", "int8", 0, (4, 3), (3, 1)) == Slice("w", "int8", 0, (12,), (1,))
    transposed = canonical("w", "int8", 0, (3, 4), (1, 3))
    assert transposed == Slice("w", "int8", 0, (3, 4), (1, 3))
    empty = Slice("w", "int8", 0, (0,), (1,))
    assert canonical("w", "int8", 7, (4, 0, 3), (0, 3, 1)) == empty


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "message"),
    [
        (0, (4, 3), (0, 1), r"'w': found stride=\(0, 1\) of 0.*source_stride"),
        (0, (1, 2), (5, 0), "stride"),
        (-1, (4,), (1,), "negative.*offset=-1"),
        (0, (-4,), (1,), "negative"),
        (0, (4,), (-1,), "negative"),
        (0, (4,), (1, 1), "one stride a dim"),
    ],
)
def test_canonical_refuses(offset, shape, stride, message) -> None:
    with pytest.raises(SliceError, match=message):
        canonical("w", "int8", offset, shape, stride)


@given(SHAPES)
def test_contiguous_stride_is_numpys(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, np.int8)
    assert contiguous_stride(shape) == array.strides


def test_contiguous_stride_of_an_empty_shape_is_positive() -> None:
    assert contiguous_stride((2, 0, 3)) == (3, 3, 1)


@given(st.data())
def test_drawn_slices_are_in_bounds_and_canonical(data: st.DataObject) -> None:
    meta = data.draw(param_metas())
    slice_ = data.draw(slices(meta))
    check_bounds(slice_, meta)
    packed = pack_slice(slice_, bytes(i % 251 for i in range(meta.num_bytes)))
    assert len(packed) == slice_.num_bytes


@given(param_metas())
def test_whole_is_every_byte_in_order(meta: ParamMeta) -> None:
    source = bytes(i % 251 for i in range(meta.num_bytes))
    check_bounds(whole(meta), meta)
    assert pack_slice(whole(meta), source) == source


@pytest.mark.parametrize(
    ("slice_", "message"),
    [
        (
            Slice("w", "bfloat16", 0, (7,), (1,)),
            "within its 12 bytes, found one that ends at byte 14",
        ),
        (Slice("w", "bfloat16", 6, (), ()), "ends at byte 14"),
        (Slice("w", "bfloat16", 1, (2, 2), (4, 1)), "ends at byte 14"),
        (Slice("w", "float32", 1, (3,), (1,)), "ends at byte 16"),
        (Slice("v", "bfloat16", 0, (1,), (1,)), "expected a slice of 'w', found one of 'v'"),
        (Slice("w", "bfloat16", 0, (1,), (1,)), "expected the canonical"),
        (Slice("w", "bfloat16", 0, (2, 2), (2, 1)), "expected the canonical"),
        (Slice("w", "bfloat16", 3, (0,), (1,)), "expected the canonical"),
        (Slice("w", "bfloat16", -1, (2,), (1,)), "negative"),
        (Slice("w", "bfloat16", 0, (2,), (0,)), "source_stride"),
    ],
)
def test_check_bounds_refuses(slice_: Slice, message: str) -> None:
    with pytest.raises(SliceError, match=message):
        check_bounds(slice_, ParamMeta("w", "bfloat16", (2, 3)))


def test_check_bounds_allows_a_view_of_another_dtype_and_an_empty_slice() -> None:
    meta = ParamMeta("w", "bfloat16", (2, 3))
    check_bounds(Slice("w", "float32", 0, (3,), (1,)), meta)
    check_bounds(Slice("w", "uint8", 11, (), ()), meta)
    check_bounds(Slice("w", "int64", 0, (0,), (1,)), ParamMeta("w", "bfloat16", (0, 3)))
