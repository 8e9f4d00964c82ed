"""The half of the wire's contract that says no: misuse, bad input, peers that left, closing."""

from collections.abc import Callable

import torch

from rdt_transport.errors import WireError
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
from rdt_transport.wire.base import (
    Notification,
    PeerAddress,
    ReadDone,
    ReadFailed,
    Region,
    Wire,
)

__all__ = [
    "check_bad_peers_and_messages_are_refused",
    "check_bad_regions_are_refused",
    "check_close",
    "check_disconnect",
    "check_in_flight_until_reported",
    "check_peer_gone",
    "check_several_peers",
]

KIB = 1024


def check_in_flight_until_reported(make_wire: MakeWire) -> None:
    """From post until poll reports its end a handle can be neither posted again nor released."""
    source, target = random_bytes(KIB, 11), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        handle = prepare(reader, server, region_of(target), region_of(source))

        def post_and_misuse(wire: Wire) -> None:
            wire.post(handle, b"first")
            expect_refused("posting in flight", lambda: wire.post(handle, b"second"))
            expect_refused("releasing in flight", lambda: wire.release(handle))

        reader.call(post_and_misuse)
        expect(reader.take(1) == [ReadDone(handle)], "the read did not end")
        reader.call(lambda wire: wire.release(handle))
        for action in (lambda wire: wire.post(handle, b"x"), lambda wire: wire.release(handle)):
            expect_refused("a released handle", lambda action=action: reader.call(action))
        found = server.take(1)
        expect(found == [Notification(reader.name, b"first")], f"found {found}")


def check_bad_regions_are_refused(make_wire: MakeWire) -> None:
    """Empty, unequal, overlapping or unregistered regions, and no regions at all, are refused when
    a read is prepared."""
    source, target = random_bytes(KIB, 12), torch.zeros(KIB, dtype=torch.uint8)
    stranger = torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        good, remote = region_of(target), region_of(source)
        cases = {
            "no bytes": (region_of(target, 0, 0), region_of(source, 0, 0)),
            "negative length": (region_of(target, 0, -1), region_of(source, 0, -1)),
            "unequal lengths": (region_of(target, 0, 10), region_of(source, 0, 11)),
            "local memory nobody registered": (region_of(stranger), remote),
            "remote memory nobody registered": (good, region_of(stranger)),
            "past the end here": (region_of(target, 1, KIB), remote),
            "past the end there": (good, region_of(source, 1, KIB)),
            "before the start": (good, region_of(source, -1, KIB)),
            "another device": (good, Region(remote.address, remote.num_bytes, 5)),
        }
        for what, (mine, theirs) in cases.items():
            expect_refused(
                what, lambda mine=mine, theirs=theirs: prepare(reader, server, mine, theirs)
            )
        lists = {
            "no pair at all": [],
            "one bad pair among good ones": [
                (region_of(target, 0, 9), region_of(source, 0, 9)),
                (region_of(target, 9, 9), region_of(source, KIB, 9)),
            ],
            "regions that land on the same bytes": [
                (region_of(target, 0, 9), region_of(source, 0, 9)),
                (region_of(target, 8, 9), region_of(source, 90, 9)),
            ],
        }
        for what, pairs in lists.items():
            expect_refused(
                what,
                lambda pairs=pairs: reader.call(lambda wire: wire.prepare_read(server.name, pairs)),
            )
        read(reader, prepare(reader, server, good, remote))
        expect_bytes(target, source)


def check_bad_peers_and_messages_are_refused(make_wire: MakeWire) -> None:
    """A peer nobody connected, malformed metadata, oneself, and empty messages are refused."""
    source, target = random_bytes(KIB, 13), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        handle = prepare(reader, server, region_of(target), region_of(source))
        mine, theirs = region_of(target), region_of(source)
        own = reader.call(lambda wire: wire.address())
        cases: dict[str, Callable[[Wire], object]] = {
            "reading from a stranger": lambda wire: wire.prepare_read("nobody", [(mine, theirs)]),
            "notifying a stranger": lambda wire: wire.notify("nobody", b"x"),
            "disconnecting a stranger": lambda wire: wire.disconnect("nobody"),
            "malformed metadata": lambda wire: wire.connect(PeerAddress("nobody", b"?" * 40), 1.0),
            "connecting to oneself": lambda wire: wire.connect(own, 1.0),
            "a post without notification": lambda wire: wire.post(handle, b""),
            "an empty message": lambda wire: wire.notify(server.name, b""),
        }
        for what, case in cases.items():
            expect_refused(what, lambda case=case: reader.call(case))
        with PumpedWire(lambda: make_wire("other")) as other:
            expect_refused("another's handle", lambda: other.call(lambda w: w.post(handle, b"x")))
        read(reader, handle)
        expect_bytes(target, source)


def check_disconnect(make_wire: MakeWire) -> None:
    """A peer with live handles stays; a forgotten one is unknown until it is connected again."""
    source, target = random_bytes(KIB, 14), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        regions = (region_of(target), region_of(source))
        handle = prepare(reader, server, *regions)
        expect_refused(
            "forgetting a peer with handles",
            lambda: reader.call(lambda wire: wire.disconnect(server.name)),
        )
        reader.call(lambda wire: wire.release(handle))
        reader.call(lambda wire: wire.disconnect(server.name))
        expect_refused(
            "notifying a forgotten peer",
            lambda: reader.call(lambda wire: wire.notify(server.name, b"x")),
        )
        server.call(lambda wire: wire.disconnect(reader.name))
        connect(reader, server)
        read(reader, prepare(reader, server, *regions))
        expect_bytes(target, source)


def check_several_peers(make_wire: MakeWire) -> None:
    """Reads and messages of several peers do not mix."""
    source, target = random_bytes(KIB, 15), torch.zeros(2 * KIB, dtype=torch.uint8)
    second = random_bytes(KIB, 16)
    with (
        connected_pair(make_wire, source, target) as (reader, server),
        PumpedWire(lambda: make_wire("server")) as other,
    ):
        other.call(lambda wire: wire.register([second]))
        connect(reader, other)
        read(reader, prepare(reader, server, region_of(target, 0, KIB), region_of(source)), b"1")
        read(reader, prepare(reader, other, region_of(target, KIB, KIB), region_of(second)), b"2")
        expect_bytes(target, torch.cat([source, second]))
        expect(server.take(1) == [Notification(reader.name, b"1")], "the first peer's message")
        expect(other.take(1) == [Notification(reader.name, b"2")], "the second peer's message")


def check_close(make_wire: MakeWire) -> None:
    """Close works with handles, peers and an unreported read; twice; everything else refuses."""
    source, target = random_bytes(KIB, 17), torch.zeros(KIB, dtype=torch.uint8)
    with connected_pair(make_wire, source, target) as (reader, server):
        mine, theirs = region_of(target), region_of(source)
        handle = prepare(reader, server, mine, theirs)
        address = server.call(lambda wire: wire.address())

        def post_and_close(wire: Wire) -> None:
            wire.post(handle, b"last")
            wire.close()
            wire.close()
            cases: dict[str, Callable[[], object]] = {
                "register": lambda: wire.register([target]),
                "address": wire.address,
                "connect": lambda: wire.connect(address, 1.0),
                "disconnect": lambda: wire.disconnect(server.name),
                "prepare_read": lambda: wire.prepare_read(server.name, [(mine, theirs)]),
                "post": lambda: wire.post(handle, b"x"),
                "release": lambda: wire.release(handle),
                "notify": lambda: wire.notify(server.name, b"x"),
                "poll": wire.poll,
            }
            for what, case in cases.items():
                expect_refused(f"{what} of a closed wire", case)

        reader.call(post_and_close)


def check_peer_gone(make_wire: MakeWire) -> None:
    """Reading from a peer that closed fails by its name; other peers go on, and it can be left."""
    source, target = random_bytes(KIB, 18), torch.zeros(2 * KIB, dtype=torch.uint8)
    second = random_bytes(KIB, 19)
    with (
        connected_pair(make_wire, source, target) as (reader, server),
        PumpedWire(lambda: make_wire("server")) as other,
    ):
        other.call(lambda wire: wire.register([second]))
        connect(reader, other)
        regions = (region_of(target, 0, KIB), region_of(source))
        lost = prepare(reader, server, *regions)
        kept = prepare(reader, other, region_of(target, KIB, KIB), region_of(second))
        address = server.call(lambda wire: wire.address())
        server.stop()
        try:
            reader.call(lambda wire: wire.post(lost, b"anybody?"))
        except WireError as error:
            expect(server.name in str(error), f"the error does not name the peer: {error}")
        else:
            (event,) = reader.take(1)
            expect(isinstance(event, ReadFailed), f"a closed peer was read: {event}")
        read(reader, kept)
        expect_bytes(target[KIB:], second)
        reader.call(lambda wire: wire.release(lost))
        reader.call(lambda wire: wire.disconnect(server.name))
        expect_refused(
            "connecting to a peer that is gone",
            lambda: reader.call(lambda wire: wire.connect(address, 0.5)),
        )
        read(reader, kept)
