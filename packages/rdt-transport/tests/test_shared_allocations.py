"""Storages cut from one allocation: registered as one range, and read as one region."""

import mmap

import pytest
import torch

from rdt_transport.errors import WireError
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.wire_pair import connect, random_bytes, read, region_of
from rdt_transport.wire import _regions
from rdt_transport.wire.base import Notification, Region
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

STEP, COUNT = 1024, 6


class Segment:
    """An allocation cut into neighbouring storages, as torch cuts those of a GPU."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, COUNT * STEP)
        self.tensors = [
            torch.frombuffer(self._pages, dtype=torch.uint8, count=STEP, offset=STEP * at)
            for at in range(COUNT)
        ]
        self.address = self.tensors[0].data_ptr()


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> tuple[Segment, Segment]:
    """Two, which whoever asks is told of."""
    found = Segment(), Segment()

    def allocation_of(storage: torch.UntypedStorage) -> tuple[int, int]:
        for segment in found:
            if segment.address <= storage.data_ptr() < segment.address + COUNT * STEP:
                return segment.address, COUNT * STEP
        return storage.data_ptr(), storage.nbytes()

    monkeypatch.setattr(_regions, "allocation_of", allocation_of)
    return found


def nixl(role: str, fabric: InProcessFabric) -> NixlWire:
    return NixlWire(role)


def in_process(role: str, fabric: InProcessFabric) -> InProcessWire:
    return InProcessWire(fabric, role)


def num_regions(handle) -> int:
    return handle.num_regions if hasattr(handle, "num_regions") else len(handle.pairs)


@pytest.mark.parametrize("make", [nixl, in_process])
def test_neighbours_of_one_allocation_are_one_range_and_one_region(make, segments) -> None:
    ours, theirs = segments
    fabric = InProcessFabric()
    with (
        PumpedWire(lambda: make("server", fabric)) as server,
        PumpedWire(lambda: make("reader", fabric)) as reader,
    ):
        before = server.call(lambda wire: len(wire._ranges))
        server.call(lambda wire: wire.register(theirs.tensors[1:4]))
        server.call(lambda wire: wire.register(theirs.tensors[3:5]))  # of a known allocation
        assert server.call(lambda wire: len(wire._ranges)) == before + 1
        reader.call(lambda wire: wire.register(ours.tensors))
        connect(reader, server)
        for at, tensor in enumerate(theirs.tensors):
            tensor.copy_(random_bytes(STEP, at))
        order = [1, 2, 3, 5, 0]  # here in a row; there 1 2 3 are
        pairs = [
            (region_of(here), region_of(theirs.tensors[there]))
            for here, there in zip(ours.tensors, order, strict=False)
        ]
        handle = reader.call(lambda wire: wire.prepare_read(server.name, pairs))
        assert num_regions(handle) == 3
        read(reader, handle, b"all")
        assert server.take(1) == [Notification(reader.name, b"all")]
        for here, there in zip(ours.tensors, order, strict=False):
            assert torch.equal(here, theirs.tensors[there])
        assert not ours.tensors[5].any()


def test_beyond_the_allocation_nothing_is_readable(segments) -> None:
    ours, theirs = segments
    end = theirs.address + COUNT * STEP
    fabric = InProcessFabric()
    with (
        PumpedWire(lambda: InProcessWire(fabric, "server")) as server,
        PumpedWire(lambda: InProcessWire(fabric, "reader")) as reader,
    ):
        server.call(lambda wire: wire.register(theirs.tensors[:1]))
        reader.call(lambda wire: wire.register(ours.tensors))
        connect(reader, server)
        for start in (end - 4, theirs.address - 4):
            pair = region_of(ours.tensors[0], 0, 8), Region(start, 8)
            with pytest.raises(WireError, match="lies outside its 1 registered ranges"):
                reader.call(lambda wire, pair=pair: wire.prepare_read(server.name, [pair]))


def test_every_storage_of_an_allocation_is_held(segments) -> None:
    """So torch never gives the allocation back while it is registered."""
    _, theirs = segments
    wire = InProcessWire(InProcessFabric(), "server")
    wire.register(theirs.tensors)
    held = {storage.data_ptr() for storage in wire._storages}
    assert held == {tensor.data_ptr() for tensor in theirs.tensors}
    wire.close()
