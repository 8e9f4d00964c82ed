"""Reads of drawn sizes and offsets, on every wire."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_transport.testing.wire_pair import connected_pair, random_bytes, region_of
from rdt_transport.wire.base import ReadDone
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

NUM_BYTES = 300_000
SIZES = st.one_of(
    st.integers(1, 64), st.integers(1, NUM_BYTES), st.sampled_from([8184, 8185, 65536])
)


@pytest.fixture(scope="module", params=["in_process", "nixl"])
def pair(request):
    make_wire = NixlWire if request.param == "nixl" else partial(InProcessWire, InProcessFabric())
    source, target = random_bytes(NUM_BYTES, 1), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        yield reader, server, source, target


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_read_copies_exactly_its_region(pair, data, seed):
    reader, server, source, target = pair
    num_bytes = data.draw(SIZES)
    there = data.draw(st.integers(0, NUM_BYTES - num_bytes))
    here = data.draw(st.integers(0, NUM_BYTES - num_bytes))
    source.copy_(random_bytes(NUM_BYTES, seed))
    expected = random_bytes(NUM_BYTES, seed + 1)
    target.copy_(expected)
    expected[here : here + num_bytes] = source[there : there + num_bytes]

    regions = region_of(target, here, num_bytes), region_of(source, there, num_bytes)
    handle = reader.call(lambda wire: wire.prepare_read(server.name, [regions]))
    reader.call(lambda wire: wire.post(handle, b"read"))
    assert reader.take(1) == [ReadDone(handle)]
    reader.call(lambda wire: wire.release(handle))

    assert torch.equal(target, expected)
