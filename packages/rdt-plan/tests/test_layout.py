from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ALIGNMENT, Slice, align, pack_layout
from rdt_plan.testing import dtype_names

SLICES = st.builds(
    lambda dtype, numel: Slice("w", dtype, 0, (numel,), (1,)), dtype_names(), st.integers(0, 40)
)


@given(st.lists(SLICES))
def test_slices_are_aligned_in_order_and_disjoint(slices: list[Slice]) -> None:
    layout = pack_layout(slices)
    end = 0
    for slice_, offset in zip(slices, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert offset + slice_.num_bytes <= layout.num_bytes
        if slice_.num_bytes:
            assert 0 <= offset - end < ALIGNMENT
            end = offset + slice_.num_bytes
    assert layout.num_bytes == end


@given(st.lists(SLICES))
def test_empty_slices_take_no_bytes(slices: list[Slice]) -> None:
    full = [slice_ for slice_ in slices if slice_.num_bytes]
    layout = pack_layout(slices)
    kept = [o for s, o in zip(slices, layout.offsets, strict=True) if s.num_bytes]
    assert pack_layout(full).num_bytes == layout.num_bytes
    assert list(pack_layout(full).offsets) == kept


def test_the_byte_contract() -> None:
    slices = [Slice("w", "int8", 0, (n,), (1,)) for n in (16, 1, 0, 17)]
    layout = pack_layout(slices)
    assert (layout.offsets, layout.num_bytes) == ((0, 16, 0, 32), 49)
    assert [align(n) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
