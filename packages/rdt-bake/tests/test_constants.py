import math

import pytest
import torch

from rdt_bake import UnsupportedTensorError
from rdt_bake.constants import number, uniform_element


def test_numbers_are_elements_of_the_dtype() -> None:
    assert number(0.1, torch.bfloat16) == torch.tensor(0.1).bfloat16().item()
    assert number(torch.tensor(2.9), torch.int32) == 2
    assert number(3, torch.bool) is True
    assert number(2.0, torch.complex64) == 2.0
    assert math.copysign(1, number(-0.0, torch.float32)) == -1
    assert math.isnan(number(math.nan, torch.float16))


@pytest.mark.parametrize(
    "value, dtype",
    [(1j, torch.complex64), (1, torch.float4_e2m1fn_x2), (1 << 70, torch.int8)],
)
def test_what_is_no_number_is_refused(value: complex, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedTensorError):
        number(value, dtype)


def test_uniform_means_every_bit() -> None:
    assert uniform_element(torch.full((2, 3), 1.5).t()) == 1.5
    assert uniform_element(torch.tensor(4)) == 4
    assert uniform_element(torch.full((3,), math.nan)) is not None
    assert uniform_element(torch.tensor([0.0, -0.0])) is None
    assert uniform_element(torch.arange(3)) is None
    assert uniform_element(torch.empty(0)) is None
    assert uniform_element(torch.empty(3, device="meta")) is None
