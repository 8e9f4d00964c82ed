"""The nixl wire between real processes."""

import time

import pytest
import torch

from rdt_transport.errors import PeerLostError, WireError
from rdt_transport.testing.peer_process import PeerProcess
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.wire_pair import random_bytes, region_of
from rdt_transport.wire.base import Notification, ReadDone, ReadFailed
from rdt_transport.wire.nixl import NixlWire

NUM_BYTES = 3_000_001


@pytest.fixture
def target():
    return torch.zeros(NUM_BYTES, dtype=torch.uint8)


@pytest.fixture
def reader(target):
    with PumpedWire(lambda: NixlWire("reader")) as reader:
        reader.call(lambda wire: wire.register([target]))
        yield reader


def connect(reader, address, timeout_seconds=20.0):
    reader.call(lambda wire: wire.connect(address, timeout_seconds))


def read(reader, handle, notification):
    reader.call(lambda wire: wire.post(handle, notification))
    return reader.take(1)


def test_reads_land_bit_for_bit_and_notifications_arrive_in_order(reader, target):
    with PeerProcess(NixlWire, num_bytes=NUM_BYTES, seed=1) as peer:
        address, remote = peer.ask("address"), peer.ask("region")
        connect(reader, address)
        peer.ask("connect", reader.call(lambda wire: wire.address()))
        handle = reader.call(
            lambda wire: wire.prepare_read(address.name, [(region_of(target), remote)])
        )
        for seed in range(2, 5):
            peer.ask("fill", seed)
            assert read(reader, handle, b"epoch %d" % seed) == [ReadDone(handle)]
            assert torch.equal(target, random_bytes(NUM_BYTES, seed))
        peer.ask("notify", reader.name, b"ready")

        assert reader.take(1) == [Notification(address.name, b"ready")]
        expected = [Notification(reader.name, b"epoch %d" % seed) for seed in range(2, 5)]
        assert peer.ask("take", 3) == expected
        assert peer.stop() == 0


def test_connecting_completes_while_the_peer_polls_as_an_idle_progress_thread(reader, target):
    with PeerProcess(NixlWire, num_bytes=64, poll_seconds=0.05) as peer:
        connect(reader, peer.ask("address"))
        assert peer.stop() == 0


def test_a_killed_peer_fails_reads_and_messages_by_name_and_close_survives():
    with (
        PeerProcess(NixlWire, num_bytes=NUM_BYTES, seed=1) as peer,
        PeerProcess(NixlWire, "reader", num_bytes=NUM_BYTES) as reader,
    ):
        address, remote = peer.ask("address"), peer.ask("region")
        reader.ask("connect", address)
        peer.ask("connect", reader.ask("address"))
        assert reader.ask("read", address.name, remote, b"one") is None
        assert reader.ask("contents") == random_bytes(NUM_BYTES, 1).numpy().tobytes()
        peer.kill()

        with pytest.raises(PeerLostError, match=address.name):
            # A message may still enter a socket whose other end is gone; no more than a few do.
            for _ in range(100):
                reader.ask("notify", address.name, b"anybody?")
                time.sleep(0.01)
        with pytest.raises(PeerLostError, match=address.name):
            raise PeerLostError(reader.ask("read", address.name, remote, b"two"))
        assert reader.stop() == 0


def read_in_flight(reader, target, peer):
    """A read from a frozen peer: it cannot end, because the message before is not acknowledged."""
    address, remote = peer.ask("address"), peer.ask("region")
    connect(reader, address)
    pair = region_of(target), remote
    handle = reader.call(lambda wire: wire.prepare_read(address.name, [pair]))
    assert read(reader, handle, b"one") == [ReadDone(handle)]
    peer.freeze()
    reader.call(lambda wire: wire.notify(address.name, b"unread"))
    reader.call(lambda wire: wire.post(handle, b"two"))
    time.sleep(0.1)
    assert reader.pending() == []
    return handle


def test_a_peer_that_dies_under_a_read_ends_it_as_failed(reader, target):
    with PeerProcess(NixlWire, num_bytes=NUM_BYTES, seed=1) as peer:
        handle = read_in_flight(reader, target, peer)
        peer.kill()

        (end,) = reader.take(1)
        assert isinstance(end, ReadFailed)
        assert end.handle is handle
        assert handle.peer_name in end.reason
        reader.call(lambda wire: wire.release(handle))
        reader.call(lambda wire: wire.disconnect(handle.peer_name))


def test_a_wire_closes_under_a_read_that_does_not_end(reader, target):
    with PeerProcess(NixlWire, num_bytes=NUM_BYTES, seed=1) as peer:
        read_in_flight(reader, target, peer)
        reader.stop()


def test_connecting_to_a_process_that_is_gone_ends_with_its_name(reader):
    with PeerProcess(NixlWire, num_bytes=64) as peer:
        address = peer.ask("address")
        peer.kill()

    with pytest.raises(WireError, match=address.name):
        connect(reader, address, 2.0)


def test_a_peer_that_never_polls_ends_the_connect_at_its_deadline(reader):
    with PeerProcess(NixlWire, num_bytes=64, poll_seconds=600.0) as peer:
        address = peer.ask("address")

        with pytest.raises(WireError, match=f"waited 0.5 s for its first read from {address.name}"):
            connect(reader, address, 0.5)
