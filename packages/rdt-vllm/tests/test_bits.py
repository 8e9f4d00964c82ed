"""Bitwise comparison tells every single bit, whatever the dtype and the layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_vllm.testing.bits import first_difference, flip_byte, num_bytes, num_differences, to_bytes

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.int64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    data = draw(st.binary(min_size=64 * dtype.itemsize, max_size=64 * dtype.itemsize))
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(8, 8)
    region = whole[: rows * 2 : 2, :columns]
    return region.T if draw(st.booleans()) else region


@given(tensors(), st.data())
def test_any_flipped_bit_is_found_at_its_byte(tensor: torch.Tensor, data: st.DataObject) -> None:
    assert first_difference(tensor, tensor.clone()) is None  # also where it holds NaNs

    byte = data.draw(st.integers(0, num_bytes(tensor) - 1))
    changed = to_bytes(tensor).clone()
    changed[byte] ^= 1 << data.draw(st.integers(0, 7))
    other = changed.view(tensor.dtype).view(tensor.shape)

    assert first_difference(tensor, other) == byte
    assert first_difference(other, tensor) == byte


@given(tensors())
def test_flip_changes_one_byte_of_the_tensor_itself(tensor: torch.Tensor) -> None:
    before = tensor.clone()

    byte = flip_byte(tensor)

    assert first_difference(before, tensor) == byte
    assert num_differences(before, tensor) == num_differences(tensor, before) == 1
    assert num_differences(tensor, tensor.clone()) == 0


def test_a_scalar_has_bytes() -> None:
    assert first_difference(torch.tensor(0.0), torch.tensor(-0.0)) == 3


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_other_shapes_and_dtypes_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one shape and dtype"):
        first_difference(torch.zeros(2), other)
