import pytest
import torch

from rdt_plan import LayoutError, ParamMeta, ServeChunk, Slice, SliceError
from rdt_transport.memory import Arena
from rdt_transport.pack import PackList, check_source


def packed(source: torch.Tensor, region: Slice) -> list[int]:
    """The bytes of ``region``, read from the only source of a chunk."""
    slot = Arena(1, region.num_bytes).slot(0)
    chunk = ServeChunk(0, 0, 0, region.num_bytes, (region,), (0,))
    PackList(chunk, slot).run({region.name: source})
    return slot.tolist()


@pytest.mark.parametrize("start", [0, 1, 3, 4, 16])
@pytest.mark.parametrize("count", [8, 9, 11])
def test_bytes_are_read_as_a_larger_dtype_wherever_they_start(start: int, count: int) -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    source = check_source(ParamMeta("w", "uint8", (count,)), flat[start : start + count])

    got = packed(source, Slice("w", "float32", 0, (2,), (1,)))

    assert got == list(range(start, start + 8))


def test_a_lone_element_of_any_stride_is_read_as_another_dtype() -> None:
    lone = torch.arange(1, 9, dtype=torch.int32)[::2][:1]
    source = check_source(ParamMeta("w", "int32", (1,)), lone)
    assert source.stride() == (2,)

    assert packed(source, Slice("w", "uint8", 0, (4,), (1,))) == [1, 0, 0, 0]


def test_a_contiguous_source_is_not_copied() -> None:
    whole = torch.zeros(64, dtype=torch.float32)
    for source in (whole, whole[4:8], whole[3:5], torch.zeros(())):
        meta = ParamMeta("w", "float32", tuple(source.shape))
        assert check_source(meta, source).data_ptr() == source.data_ptr()


def test_a_lazy_conjugate_is_read_as_its_values() -> None:
    lazy = torch.randn(4, dtype=torch.complex64).conj()
    source = check_source(ParamMeta("w", "complex64", (4,)), lazy)

    got = packed(source, Slice("w", "float32", 0, (8,), (1,)))

    values = torch.view_as_real(lazy.resolve_conj()).flatten()
    assert got == values.view(torch.uint8).tolist()


def test_a_source_that_is_missing_is_named() -> None:
    region = Slice("layers.0.w", "float32", 0, (4,), (1,))
    packs = PackList(ServeChunk(0, 0, 0, 16, (region,), (0,)), Arena(1, 16).slot(0))

    with pytest.raises(SliceError, match=r"layers\.0\.w: .* cannot be read"):
        packs.run({})


def test_a_source_that_is_too_small_is_named() -> None:
    region = Slice("layers.0.w", "float32", 2, (4,), (1,))
    packs = PackList(ServeChunk(0, 0, 0, 16, (region,), (0,)), Arena(1, 16).slot(0))

    with pytest.raises(SliceError, match=r"layers\.0\.w: expected at least 24 bytes .* found 20"):
        packs.run({"layers.0.w": torch.zeros(5)})


def test_a_slot_that_is_too_small_is_refused() -> None:
    region = Slice("w", "float32", 0, (4,), (1,))
    with pytest.raises(LayoutError, match="packs 16 bytes, its serve slot has 15"):
        PackList(ServeChunk(0, 0, 0, 16, (region,), (0,)), Arena(1, 15).slot(0))
