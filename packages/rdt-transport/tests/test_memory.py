import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.errors import WireError
from rdt_transport.host_memory import free_host_bytes
from rdt_transport.memory import Arena


@given(num_slots=st.integers(1, 9), slot_bytes=st.integers(1, 3000))
def test_slots_are_disjoint_aligned_and_where_their_regions_say(num_slots, slot_bytes):
    arena = Arena(num_slots, slot_bytes)
    for index in range(num_slots):
        arena.slot(index).fill_(index + 1)

    for index in range(num_slots):
        slot, region = arena.slot(index), arena.region(index)
        assert slot.dtype == torch.uint8
        assert slot.shape == (slot_bytes,)
        assert torch.equal(slot, torch.full((slot_bytes,), index + 1, dtype=torch.uint8))
        assert (region.address, region.num_bytes, region.device) == (slot.data_ptr(), slot_bytes, 0)
        assert (slot.data_ptr() - arena.buffer.data_ptr()) % Arena.ALIGNMENT == 0
        assert slot.untyped_storage().data_ptr() == arena.buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_slot_outside_the_arena_is_refused(index):
    arena = Arena(2, 8)

    with pytest.raises(WireError, match=f"slot {index} of an arena of 2"):
        arena.slot(index)
    with pytest.raises(WireError, match=f"slot {index} of an arena of 2"):
        arena.region(index)


@pytest.mark.parametrize("counts", [(0, 8), (2, 0)])
def test_an_empty_arena_is_refused(counts):
    with pytest.raises(WireError, match="needs slots and bytes"):
        Arena(*counts)


def test_an_arena_without_room_says_what_to_lower():
    with pytest.raises(WireError, match="lower num_slots or max_chunk_bytes"):
        Arena(1 << 20, 1 << 42)


def test_an_arena_larger_than_what_is_free_is_refused_before_it_is_allocated():
    free = free_host_bytes()
    assert free is not None

    with pytest.raises(WireError, match=r"on cpu, where \d+ bytes are free; lower num_slots"):
        Arena(2, free)  # the kernel would promise as much, and kill the process that touches it
