"""What every wire must do, as plain functions anybody can run on a wire of their own.

Each function of `CONTRACT` takes ``make_wire(role)`` and raises `AssertionError` when the promise
in its docstring is broken. Wires are made on threads of their own and polled there. Nothing here
needs pytest. Checks of what a wire moves are here, of what it refuses in `wire_refusals`.
"""

from collections.abc import Callable

import torch

from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.wire_pair import (
    MakeWire,
    connect,
    connected_pair,
    expect,
    expect_bytes,
    expect_refused,
    prepare,
    random_bytes,
    read,
    region_of,
)
from rdt_transport.testing.wire_refusals import (
    check_bad_peers_and_messages_are_refused,
    check_bad_regions_are_refused,
    check_close,
    check_disconnect,
    check_in_flight_until_reported,
    check_peer_gone,
    check_several_peers,
)
from rdt_transport.wire.base import Notification, ReadDone, Region, Wire

__all__ = ["CONTRACT", "check_wire"]

KIB = 1024


def check_wire(make_wire: MakeWire) -> None:
    """Run the whole contract."""
    for check in CONTRACT:
        check(make_wire)


def check_names_are_unique(make_wire: MakeWire) -> None:
    """Two wires of one role have names of their own, which begin with the role."""
    with PumpedWire(lambda: make_wire("role")) as one, PumpedWire(lambda: make_wire("role")) as two:
        expect(one.name != two.name, f"both are called {one.name}")
        expect(one.name.startswith("role"), f"{one.name} does not begin with its role")
        address = one.call(lambda wire: wire.address())
        expect(address.name == one.name, f"{one.name} has the address of {address.name}")


def check_read_moves_bytes(make_wire: MakeWire) -> None:
    """A read copies exactly its region, and the peer gets its notification."""
    source, target = random_bytes(5 * KIB, 1), torch.zeros(3 * KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        local, remote = region_of(target, 100, 2 * KIB), region_of(source, 77, 2 * KIB)
        read(reader, prepare(reader, server, local, remote), b"hello")
        expect_bytes(target[100 : 100 + 2 * KIB], source[77 : 77 + 2 * KIB])
        expect(not target[:100].any(), "bytes before the region changed")
        expect(not target[100 + 2 * KIB :].any(), "bytes behind the region changed")
        expected = [Notification(reader.name, b"hello")]
        expect(server.take(1) == expected, "the peer did not get the notification")


def check_large_read(make_wire: MakeWire) -> None:
    """A read of some MiB lands whole."""
    source, target = random_bytes(9 << 20, 2), torch.zeros(9 << 20, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        read(reader, prepare(reader, server, region_of(target), region_of(source)))
        expect_bytes(target, source)


def check_many_regions_in_one_read(make_wire: MakeWire) -> None:
    """One handle reads many regions, of several storages, each exactly, with one notification."""
    source, target = random_bytes(4 * KIB, 21), torch.zeros(4 * KIB, dtype=torch.uint8)
    others = random_bytes(KIB, 22), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        server.call(lambda wire: wire.register([others[0]]))
        reader.call(lambda wire: wire.register([others[1]]))
        connect(reader, server)
        places = [(0, 100, 50), (50, 150, 70), (1000, 10, 1), (500, 3000, 333), (120, 2000, 9)]
        pairs = [(region_of(target, to, n), region_of(source, at, n)) for to, at, n in places]
        pairs.append((region_of(others[1], 5, 99), region_of(others[0], 901, 99)))
        expected, other = torch.zeros_like(target), torch.zeros_like(others[1])
        for to, at, n in places:
            expected[to : to + n] = source[at : at + n]
        other[5 : 5 + 99] = others[0][901 : 901 + 99]
        handle = reader.call(lambda wire: wire.prepare_read(server.name, pairs))
        for _ in range(2):
            target.zero_()
            read(reader, handle, b"all")
            expect_bytes(target, expected)
            expect_bytes(others[1], other)
            expect(server.take(1) == [Notification(reader.name, b"all")], "one notification each")


def check_hundreds_of_regions(make_wire: MakeWire) -> None:
    """However many regions: each lands, nothing else does, and the message comes after the last."""
    count, step = 700, 48
    source, target = (torch.zeros(count * step, dtype=torch.uint8) for _ in range(2))
    with connected_pair(make_wire, source, target) as (reader, server):
        pairs = [
            (region_of(target, step * at, step - 1), region_of(source, step * (count - 1 - at), 47))
            for at in range(count)
        ]
        handle = reader.call(lambda wire: wire.prepare_read(server.name, pairs))
        for epoch in range(5):
            sent = source.copy_(random_bytes(count * step, 200 + epoch)).clone()
            target.fill_(255)
            reader.call(lambda wire: wire.post(handle, b"all"))
            expect(server.take(1) == [Notification(reader.name, b"all")], "one notification")
            source.zero_()  # what a peer does that was told so
            expect(reader.take(1) == [ReadDone(handle)], "one end")
            expected = sent.view(count, step).flip(0).clone()
            expected[:, step - 1] = 255
            expect_bytes(target.view(count, step), expected)


def check_handle_is_posted_again(make_wire: MakeWire) -> None:
    """A handle reads what is there when it is posted; each post has one end and its own message."""
    source, target = random_bytes(4 * KIB, 3), torch.zeros(4 * KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        handle = prepare(reader, server, region_of(target), region_of(source))
        for epoch in range(5):
            source.copy_(random_bytes(4 * KIB, 100 + epoch))
            read(reader, handle, b"epoch %d" % epoch)
            expect_bytes(target, source)
        expected = [Notification(reader.name, b"epoch %d" % epoch) for epoch in range(5)]
        found = server.take(5)
        expect(found == expected, f"expected {expected}, found {found}")
        expect(reader.pending() == [], f"one post had two ends: {reader.pending()}")
        expect(server.pending() == [], f"unexpected at the peer: {server.pending()}")


def check_several_reads_in_flight(make_wire: MakeWire) -> None:
    """Reads of several handles posted together all land, whatever order they end in."""
    source, target = random_bytes(64 * KIB, 4), torch.zeros(64 * KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        parts = [
            (region_of(target, start, 4 * KIB), region_of(source, start, 4 * KIB))
            for start in range(0, 64 * KIB, 4 * KIB)
        ]
        handles = [prepare(reader, server, *part) for part in parts]

        def post_all(wire: Wire) -> None:
            for index, handle in enumerate(handles):
                wire.post(handle, b"%d" % index)

        reader.call(post_all)
        ends = reader.take(len(handles))
        expect(
            all(ends.count(ReadDone(handle)) == 1 for handle in handles),
            f"expected one ReadDone a handle, found {ends}",
        )
        expect_bytes(target, source)
        found = server.take(len(handles))
        sent = [Notification(reader.name, b"%d" % index) for index in range(len(handles))]
        expect(all(found.count(each) == 1 for each in sent), f"expected {sent}, found {found}")


def check_notify_both_ways_in_order(make_wire: MakeWire) -> None:
    """Messages arrive once, in their sender's order, under its name; connecting sends none."""
    source, target = random_bytes(KIB, 5), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        for one, other in ((reader, server), (server, reader)):
            messages = [b"%d" % index for index in range(50)]

            def send(wire: Wire, peer: str = other.name, batch: list[bytes] = messages) -> None:
                for message in batch:
                    wire.notify(peer, message)

            one.call(send)
            expected = [Notification(one.name, message) for message in messages]
            found = other.take(len(expected))
            expect(found == expected, f"expected {expected}, found {found}")
        left = reader.pending() + server.pending()
        expect(left == [], f"unexpected events: {left}")


def check_metadata_grows(make_wire: MakeWire) -> None:
    """Connecting again with a newer address adds what was registered; old handles stay valid."""
    source, target = random_bytes(KIB, 6), torch.zeros(2 * KIB, dtype=torch.uint8)
    later = random_bytes(KIB, 7)
    with connected_pair(make_wire, source, target) as (reader, server):
        old = prepare(reader, server, region_of(target, 0, KIB), region_of(source))
        read(reader, old)
        half = region_of(target, KIB, KIB)
        server.call(lambda wire: wire.register([later]))
        expect_refused(
            "a read of memory the known address does not cover",
            lambda: prepare(reader, server, half, region_of(later)),
        )
        connect(reader, server)
        read(reader, prepare(reader, server, half, region_of(later)))
        source.copy_(random_bytes(KIB, 8))
        read(reader, old)
        expect_bytes(target[:KIB], source)
        expect_bytes(target[KIB:], later)


def check_whole_storages_are_registered(make_wire: MakeWire) -> None:
    """A view registers its storage, once however many views and calls; empty buffers are fine."""
    storage, target = random_bytes(4 * KIB, 9), torch.zeros(4 * KIB, dtype=torch.uint8)
    with connected_pair(make_wire, storage[KIB : 2 * KIB], target) as (reader, server):
        views = [storage[:16], storage[16:].view(torch.int16), torch.empty(0)]
        server.call(lambda wire: wire.register(views))
        server.call(lambda wire: wire.register([storage]))
        connect(reader, server)
        read(reader, prepare(reader, server, region_of(target), region_of(storage)))
        expect_bytes(target, storage)


def check_registered_memory_is_kept(make_wire: MakeWire) -> None:
    """The wire holds what it registered: dropping the tensor does not give the memory back."""
    source, target = random_bytes(KIB, 10), torch.zeros(64 * KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        remote = server.call(lambda wire: _register_and_drop(wire, 64 * KIB))
        takers = [torch.zeros(64 * KIB, dtype=torch.uint8) for _ in range(8)]
        connect(reader, server)
        read(reader, prepare(reader, server, region_of(target), remote))
        expect_bytes(target, random_bytes(64 * KIB, 11))
        expect(not any(taken.any() for taken in takers), "the memory was given away")


def _register_and_drop(wire: Wire, num_bytes: int) -> Region:
    buffer = random_bytes(num_bytes, 11)
    wire.register([buffer])
    return region_of(buffer)


CONTRACT: tuple[Callable[[MakeWire], None], ...] = (
    check_names_are_unique,
    check_read_moves_bytes,
    check_large_read,
    check_many_regions_in_one_read,
    check_hundreds_of_regions,
    check_handle_is_posted_again,
    check_several_reads_in_flight,
    check_notify_both_ways_in_order,
    check_metadata_grows,
    check_whole_storages_are_registered,
    check_registered_memory_is_kept,
    check_in_flight_until_reported,
    check_bad_regions_are_refused,
    check_bad_peers_and_messages_are_refused,
    check_disconnect,
    check_several_peers,
    check_close,
    check_peer_gone,
)
