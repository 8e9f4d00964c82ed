import pytest
import torch

from rdt_plan import ParamMeta, ServeChunk, Slice, SliceError
from rdt_transport.memory import Arena
from rdt_transport.pack import PackList, check_source, read_slice


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("start", [0, 1, 3, 4, 16])
@pytest.mark.parametrize("count", [8, 9, 11])
def test_bytes_are_viewed_as_a_larger_dtype_wherever_they_start(start: int, count: int) -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    source = check_source(ParamMeta("w", "uint8", (count,)), flat[start : start + count])

    got = read_slice(source, Slice("w", "float32", 0, (2,), (1,)))

    assert bits(got) == list(range(start, start + 8))


def test_a_lone_element_of_any_stride_is_viewed_as_another_dtype() -> None:
    lone = torch.arange(1, 9, dtype=torch.int32)[::2][:1]
    source = check_source(ParamMeta("w", "int32", (1,)), lone)
    assert source.stride() == (2,)

    got = read_slice(source, Slice("w", "uint8", 0, (4,), (1,)))

    assert got.tolist() == [1, 0, 0, 0]


def test_an_aligned_source_is_not_copied() -> None:
    whole = torch.zeros(64, dtype=torch.float32)
    for source in (whole, whole[4:8], torch.zeros(())):
        meta = ParamMeta("w", "float32", tuple(source.shape))
        assert check_source(meta, source).data_ptr() == source.data_ptr()


def test_a_lazy_conjugate_is_read_as_its_values() -> None:
    lazy = torch.randn(4, dtype=torch.complex64).conj()
    source = check_source(ParamMeta("w", "complex64", (4,)), lazy)

    got = read_slice(source, Slice("w", "float32", 0, (8,), (1,)))

    assert got.tolist() == torch.view_as_real(lazy.resolve_conj()).view(-1).tolist()


def test_a_source_that_is_missing_is_named() -> None:
    region = Slice("layers.0.w", "float32", 0, (4,), (1,))
    packs = PackList(ServeChunk(0, 0, 0, 16, (region,), (0,)), Arena(1, 16).slot(0))

    with pytest.raises(SliceError, match=r"layers\.0\.w: .* cannot be read"):
        packs.run({})
