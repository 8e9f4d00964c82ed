import pytest

from rdt_transport.errors import WireError
from rdt_transport.wire._regions import RegisteredRange, RegisteredRanges, check_pairs, spans_of
from rdt_transport.wire.base import Region

RANGES = RegisteredRanges(
    "peer", [RegisteredRange(100, 50, 0, "DRAM"), RegisteredRange(1000, 50, 3, "VRAM")]
)


def test_the_memory_of_regions_is_the_one_kind_they_all_lie_in() -> None:
    assert RANGES.memory_of([Region(100, 5), Region(149, 1)]) == "DRAM"
    assert RANGES.memory_of([Region(1000, 50, 3)]) == "VRAM"
    with pytest.raises(WireError, match="peer: the regions of one read lie in DRAM and VRAM; read"):
        RANGES.memory_of([Region(100, 5), Region(1000, 50, 3)])


def test_a_region_outside_or_of_another_device_is_in_no_memory() -> None:
    for stranger in (Region(150, 1), Region(1000, 50, 2), Region(99, 2)):
        with pytest.raises(WireError, match="lies outside its 2 registered ranges"):
            RANGES.memory_of([Region(100, 5), stranger])


def test_spans_are_what_an_agent_takes() -> None:
    assert spans_of([Region(100, 5), Region(1000, 50, 3)]) == [(100, 5, 0), (1000, 50, 3)]


def test_pairs_have_equal_lengths_and_there_is_one() -> None:
    check_pairs("peer", [(Region(0, 5), Region(9, 5))])
    with pytest.raises(WireError, match="needs at least one pair of regions, found none"):
        check_pairs("peer", [])
    with pytest.raises(WireError, match="found 5 bytes here and 6 there"):
        check_pairs("peer", [(Region(0, 5), Region(9, 5)), (Region(0, 5), Region(9, 6))])
