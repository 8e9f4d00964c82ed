"""Merging regions: the same bytes, in the fewest descriptors, never across a registration."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Chunk, Placement, ServeChunk, Slice
from rdt_plan.records import SourceRegion
from rdt_transport.direct_reads import direct_pairs, merged
from rdt_transport.errors import DisagreementError, WireError
from rdt_transport.wire.base import Region

LOCAL, REMOTE = 10_000, 50_000


def bytes_of(pairs):
    """Which remote byte each local byte gets."""
    return {
        local.address + at: remote.address + at
        for local, remote in pairs
        for at in range(local.num_bytes)
    }


def range_of(borders):
    """Ranges that begin at these addresses: the number of the one that holds a region."""
    return lambda region: sum(border <= region.address for border in borders)


@st.composite
def jobs(draw):
    """Pairs whose local regions are disjoint, in any order, and borders that cut none of them."""
    local, remote, pairs = LOCAL, REMOTE, []
    for _ in range(draw(st.integers(1, 12))):
        local += draw(st.sampled_from([0, 0, 0, 3]))
        remote += draw(st.sampled_from([0, 0, 0, 5, -40]))
        num_bytes = draw(st.integers(1, 9))
        pairs.append((Region(local, num_bytes), Region(remote, num_bytes)))
        local, remote = local + num_bytes, remote + num_bytes
    starts = st.sampled_from([pair[0].address for pair in pairs])
    others = st.sampled_from([pair[1].address for pair in pairs])
    ours = range_of(draw(st.lists(starts, max_size=2)))
    theirs = range_of(draw(st.lists(others, max_size=2)))
    return draw(st.permutations(pairs)), ours, theirs


@given(jobs())
def test_merging_moves_the_same_bytes_and_stays_inside_registrations(job):
    pairs, ours, theirs = job

    found = merged(pairs, ours, theirs)

    assert bytes_of(found) == bytes_of(pairs)
    for side, number in ((0, ours), (1, theirs)):
        within = {pair[side]: number(pair[side]) for pair in found}
        for pair in pairs:
            (holder,) = [
                each[side]
                for each in found
                if each[0].address <= pair[0].address
                and pair[0].address + pair[0].num_bytes <= each[0].address + each[0].num_bytes
            ]
            assert within[holder] == number(pair[side])


@given(jobs())
def test_nothing_that_could_be_merged_is_left(job):
    pairs, ours, theirs = job

    found = merged(pairs, ours, theirs)

    pieces = sorted(pairs, key=lambda pair: pair[0].address)
    borders = 1  # counted the other way round: where two sorted neighbours do not belong together
    for before, after in pairwise(pieces):
        adjacent = all(
            b.address + b.num_bytes == a.address for b, a in zip(before, after, strict=True)
        )
        same = ours(before[0]) == ours(after[0]) and theirs(before[1]) == theirs(after[1])
        borders += not (adjacent and same)
    assert len(found) == borders


def test_regions_that_land_on_the_same_bytes_are_refused():
    pairs = [(Region(LOCAL, 9), Region(REMOTE, 9)), (Region(LOCAL + 8, 9), Region(REMOTE + 90, 9))]

    with pytest.raises(WireError, match="two regions of one read land on the bytes from 0x2718 on"):
        merged(pairs, range_of([]), range_of([]))


def test_devices_are_kept_apart():
    pairs = [(Region(LOCAL, 9, 0), Region(REMOTE, 9)), (Region(LOCAL + 8, 9, 1), Region(70_000, 9))]

    assert merged(pairs, range_of([]), range_of([])) == pairs


def chunk_of(region, offset, shape):
    place = Placement(region, "m", "w", offset, shape, (1,), region.dtype, (1,))
    serve = ServeChunk(0, 0, None, region.num_bytes, (region,), ())
    return Chunk(0, 3, serve, None, (place,), ("m",), ("m",))


def test_pairs_lie_where_the_slice_and_the_placement_say():
    chunk = chunk_of(Slice("w", "float32", 5, (4,), (1,)), 2, (4,))
    target = torch.zeros(8)

    pairs = list(direct_pairs(chunk, {"w": SourceRegion(0, 4096, 6)}, lambda module, param: target))

    assert pairs == [(Region(target.data_ptr() + 8, 16), Region(4096 + 20, 16, 6))]


def test_a_source_that_was_not_published_is_refused_by_name():
    chunk = chunk_of(Slice("w", "float32", 5, (4,), (1,)), 2, (4,))

    with pytest.raises(DisagreementError, match=r"chunk 0 reads 'w' directly, but producer 3 has"):
        list(direct_pairs(chunk, {}, lambda module, param: torch.zeros(8)))


@pytest.mark.parametrize("target", [torch.zeros(5), torch.zeros(8, 2)[:, 0]])
def test_a_destination_without_room_is_refused_by_name(target):
    chunk = chunk_of(Slice("w", "float32", 5, (4,), (1,)), 2, (4,))

    with pytest.raises(WireError, match=r"m\.w: a read of 'w' needs 24 contiguous bytes, found"):
        list(direct_pairs(chunk, {"w": SourceRegion(0, 4096, 0)}, lambda module, param: target))
