"""The ray wire: the contract of all wires, and what only several processes can show."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
import ray
import torch

from rdt_transport.errors import PeerLostError, RayMissingError, WireError
from rdt_transport.testing.peer_process import PeerProcess
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.ray_wires import (
    PROC_MEMORY,
    proc_memory_wire,
    register_proc_memory,
    serving_wire,
)
from rdt_transport.testing.wire_contract import CONTRACT, check_notify_both_ways_in_order
from rdt_transport.testing.wire_pair import connected_pair, expect_refused, random_bytes, region_of
from rdt_transport.testing.wire_refusals import check_disconnect, check_peer_gone
from rdt_transport.wire import _ray_agent, _ray_served
from rdt_transport.wire.base import Notification, PeerAddress, ReadDone, ReadFailed
from rdt_transport.wire.nixl import NixlWire
from rdt_transport.wire.ray import RayWire

NUM_BYTES = 3_000_001


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that this process is attached to as a driver."""
    options = {"memory_monitor_refresh_ms": 0}  # an office must not go because tests take memory
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _system_config=options
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def target() -> torch.Tensor:
    return torch.zeros(NUM_BYTES, dtype=torch.uint8)


@pytest.fixture
def reader(cluster: str, target: torch.Tensor) -> Iterator[PumpedWire]:
    with PumpedWire(lambda: RayWire("reader", serves=False)) as reader:
        reader.call(lambda wire: wire.register([target]))
        yield reader


def as_sessions_use_it(role: str) -> RayWire:
    return RayWire(role, serves=role != "reader")


def read(reader: PumpedWire, handle, notification: bytes = b"read"):
    reader.call(lambda wire: wire.post(handle, notification))
    return reader.take(1)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(cluster, check):
    check(as_sessions_use_it)


@pytest.mark.parametrize(
    "check", [check_notify_both_ways_in_order, check_disconnect, check_peer_gone]
)
def test_contract_where_both_serve(cluster, check):
    check(RayWire)


def test_a_driver_reads_another_bit_for_bit_and_messages_keep_their_order(cluster, reader, target):
    with PeerProcess(partial(serving_wire, address=cluster), num_bytes=NUM_BYTES, seed=1) as peer:
        address, remote = peer.ask("address"), peer.ask("region")
        reader.call(lambda wire: wire.connect(address, 20.0))
        peer.ask("connect", reader.call(lambda wire: wire.address()))
        handle = reader.call(
            lambda wire: wire.prepare_read(address.name, [(region_of(target), remote)])
        )
        for seed in range(2, 5):
            peer.ask("fill", seed)
            assert read(reader, handle, b"epoch %d" % seed) == [ReadDone(handle)]
            assert torch.equal(target, random_bytes(NUM_BYTES, seed))
        for index in range(20):
            peer.ask("notify", reader.name, b"%d" % index)

        assert reader.take(20) == [Notification(address.name, b"%d" % index) for index in range(20)]
        expected = [Notification(reader.name, b"epoch %d" % seed) for seed in range(2, 5)]
        assert peer.ask("take", 3) == expected
        reader.call(lambda wire: wire.release(handle))
        reader.call(lambda wire: wire.disconnect(address.name))
        assert peer.stop() == 0


def test_regions_land_where_they_belong_and_nothing_is_copied_again(
    cluster, reader, target, monkeypatch
):
    with PeerProcess(partial(serving_wire, address=cluster), num_bytes=NUM_BYTES, seed=1) as peer:
        address, remote = peer.ask("address"), peer.ask("region")
        reader.call(lambda wire: wire.connect(address, 20.0))
        source = random_bytes(NUM_BYTES, 1)
        pairs, expected = [], torch.zeros_like(target)
        for at in range(0, 100_000, 1000):
            there = region_of(source, 2 * at + 7, 900)
            shifted = type(there)(remote.address + 2 * at + 7, 900)
            pairs.append((region_of(target, at, 900), shifted))
            expected[at : at + 900] = source[2 * at + 7 :][:900]
        handle = reader.call(lambda wire: wire.prepare_read(address.name, pairs))
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "copy_", None)  # Ray's transport reads into the targets
            assert read(reader, handle) == [ReadDone(handle)]
        assert torch.equal(target, expected)


def test_a_killed_peer_fails_reads_and_messages_by_name(cluster, reader, target):
    with PeerProcess(partial(serving_wire, address=cluster), num_bytes=NUM_BYTES, seed=1) as peer:
        address, remote = peer.ask("address"), peer.ask("region")
        reader.call(lambda wire: wire.connect(address, 20.0))
        pair = region_of(target), remote
        handle = reader.call(lambda wire: wire.prepare_read(address.name, [pair]))
        assert read(reader, handle) == [ReadDone(handle)]
        peer.kill()
        try:
            (end,) = read(reader, handle)
        except PeerLostError as error:  # we were told before
            assert address.name in str(error)
        else:
            assert isinstance(end, ReadFailed)
            assert address.name in end.reason
        with pytest.raises(PeerLostError, match=address.name):
            for _ in range(500):  # Ray notices the death of a driver in a while
                reader.call(lambda wire: wire.notify(address.name, b"anybody?"))
                time.sleep(0.02)
        unanswered = reader.call(lambda wire: wire.prepare_read(address.name, [pair]))
        with pytest.raises(PeerLostError, match=address.name):
            read(reader, unanswered)
        for each in (handle, unanswered):
            reader.call(lambda wire, each=each: wire.release(each))
        reader.call(lambda wire: wire.disconnect(address.name))
        with pytest.raises(PeerLostError, match=rf"{address.name} has no office"):
            reader.call(lambda wire: wire.connect(address, 20.0))


def test_it_works_over_any_one_sided_transport_that_ray_knows(cluster, target):
    register_proc_memory()
    make_peer = partial(proc_memory_wire, address=cluster)
    with (
        PeerProcess(make_peer, num_bytes=NUM_BYTES, seed=1) as peer,
        PumpedWire(lambda: RayWire("reader", serves=False, transport=PROC_MEMORY)) as reader,
        PumpedWire(lambda: RayWire("other", serves=False)) as other,
    ):
        address, remote = peer.ask("address"), peer.ask("region")
        reader.call(lambda wire: wire.register([target]))
        reader.call(lambda wire: wire.connect(address, 20.0))
        handle = reader.call(
            lambda wire: wire.prepare_read(address.name, [(region_of(target), remote)])
        )
        for seed in (1, 2):
            peer.ask("fill", seed)
            assert read(reader, handle) == [ReadDone(handle)]
            assert torch.equal(target, random_bytes(NUM_BYTES, seed))
        with pytest.raises(WireError, match=r"uses Ray's transport PROC_MEMORY, .* uses NIXL"):
            other.call(lambda wire: wire.connect(address, 20.0))


def test_a_region_that_is_gone_at_the_peer_fails_the_read(cluster, reader, target):
    source = random_bytes(100, 1)
    with PumpedWire(lambda: RayWire("server")) as server:
        server.call(lambda wire: wire.register([source]))
        address = server.call(lambda wire: wire.address())
        reader.call(lambda wire: wire.connect(address, 20.0))
        server.call(lambda wire: wire._memory.ranges.discard(next(iter(wire._memory.ranges))))
        server.call(lambda wire: wire._memory.ranges.discard(next(iter(wire._memory.ranges))))
        pair = region_of(target, 0, 100), region_of(source)
        handle = reader.call(lambda wire: wire.prepare_read(address.name, [pair]))

        (end,) = read(reader, handle)
        assert isinstance(end, ReadFailed)
        assert "lies outside its 0 registered ranges" in end.reason


def test_a_read_has_failed_unless_its_peer_could_be_told(cluster, reader, target):
    """A wire that closes gives its memory back: what was read meanwhile may be anything."""
    source = random_bytes(100, 1)
    with PumpedWire(lambda: RayWire("server")) as server:
        server.call(lambda wire: wire.register([source]))
        address = server.call(lambda wire: wire.address())
        reader.call(lambda wire: wire.connect(address, 20.0))
        pair = region_of(target, 0, 100), region_of(source)
        handle = reader.call(lambda wire: wire.prepare_read(address.name, [pair]))
        assert read(reader, handle) == [ReadDone(handle)]
        ray.get(ray.get_actor(address.name, namespace="rdt").close.remote())

        (end,) = read(reader, handle)
        assert isinstance(end, ReadFailed)
        assert end.reason == f"reading from {address.name}: it was closed"


def test_two_that_only_read_and_other_wires_are_refused(cluster, reader):
    with PumpedWire(lambda: RayWire("other", serves=False)) as other:
        address = other.call(lambda wire: wire.address())
        with pytest.raises(WireError, match="only read; one of two must serve"):
            reader.call(lambda wire: wire.connect(address, 1.0))
    with PumpedWire(lambda: NixlWire("nixl")) as nixl:
        theirs = nixl.call(lambda wire: wire.address())
        ours = reader.call(lambda wire: wire.address())
        with pytest.raises(WireError, match="give the trainer and its workers the same wire="):
            reader.call(lambda wire: wire.connect(theirs, 1.0))
        with pytest.raises(WireError, match="not of this wire"):
            nixl.call(lambda wire: wire.connect(ours, 1.0))


def fields(*ranges: object) -> bytes:
    return json.dumps({"ray": "NIXL", "serves": True, "ranges": ranges}).encode()


@pytest.mark.parametrize(
    "metadata",
    [b"", b"[]", b"{}", b"\xff" * 9, fields([1, 2, 0]), fields(["1", 2, 0, "DRAM"]), fields(7)],
)
def test_metadata_that_is_not_ours_is_refused(cluster, reader, metadata):
    with pytest.raises(WireError, match="metadata of peer is not of the ray wire"):
        reader.call(lambda wire: wire.connect(PeerAddress("peer", metadata), 1.0))


def test_one_that_only_reads_cannot_be_read(cluster):
    source, target = random_bytes(100, 1), torch.zeros(100, dtype=torch.uint8)
    with connected_pair(as_sessions_use_it, source, target) as (reader, server):
        pair = region_of(source), region_of(target)
        expect_refused(
            "reading a reader",
            lambda: server.call(lambda wire: wire.prepare_read(reader.name, [pair])),
        )


def test_a_wire_whose_office_dies_says_so_when_it_is_polled(cluster):
    wire = RayWire("server")
    try:
        wire.poll()
        ray.kill(wire._office)
        with pytest.raises(WireError, match=rf"the office of {wire.name} is gone"):
            for _ in range(500):
                wire.poll()
                time.sleep(0.02)
    finally:
        wire.close()


def test_more_readers_than_ray_lets_call_at_once_wait_for_letters(cluster):
    with PumpedWire(lambda: RayWire("server")) as server:
        office = ray.get_actor(server.name, namespace="rdt")
        names = [f"reader {number}" for number in range(1100)]
        waiting = {name: office.take.remote(name, 60.0) for name in names}
        letters = [(name, server.name, "note", b"now") for name in names]
        assert ray.get(office.post.remote(letters), timeout=30)
        for letter, found in zip(letters, ray.get(list(waiting.values()), timeout=30), strict=True):
            assert found == [letter]


@pytest.mark.timeout(120)
def test_what_reads_leave_in_the_process_that_is_read_is_dropped(cluster, monkeypatch):
    """Ray's agent is given a message by every read of another process, and takes none."""
    program = f"""
import ray, torch
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.testing.wire_pair import region_of
from rdt_transport.wire.ray import RayWire
from rdt_transport.wire.base import PeerAddress
ray.init(address={cluster!r}, log_to_driver=False)
target = torch.zeros(100, dtype=torch.uint8)
address, remote = eval(input(), {{"PeerAddress": PeerAddress, "Region": type(region_of(target))}})
with PumpedWire(lambda: RayWire("reader", serves=False)) as reader:
    reader.call(lambda wire: wire.register([target]))
    reader.call(lambda wire: wire.connect(address, 20.0))
    pairs = [(region_of(target), remote)]
    handle = reader.call(lambda wire: wire.prepare_read(address.name, pairs))
    for _ in range(12):
        reader.call(lambda wire: wire.post(handle, b"read"))
        reader.take(1)
"""
    monkeypatch.setattr(_ray_served, "_FORGET_EVERY", 5)
    source = random_bytes(100, 1)
    with PumpedWire(lambda: RayWire("server")) as server:
        server.call(lambda wire: wire.register([source]))
        given = repr((server.call(lambda wire: wire.address()), region_of(source)))
        ran = subprocess.run([sys.executable, "-c", program], input=given, text=True, timeout=100)
        assert ran.returncode == 0
        assert len(server.take(12)) == 12
        server.call(lambda wire: wire._jobs.run(lambda: None)).result(30)
        left = _ray_agent._manager().get_nixl_agent().get_new_notifs()
        assert sum(map(len, left.values())) < 12


def test_one_that_cannot_be_made_leaves_the_cluster(cluster):
    program = f"""
import ray
from rdt_transport.wire import _ray_direct
from rdt_transport.wire.ray import RayWire
def refuse(): raise ImportError("this Ray has no NIXL")
_ray_direct.calm_agent = refuse
try:
    RayWire("reader", serves=False, address={cluster!r})
except ImportError:
    assert not ray.is_initialized()
else:
    raise AssertionError
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_importing_it_imports_no_ray():
    program = (
        "import sys\nimport rdt_transport.wire.ray, rdt_transport.wire.choice\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('ray', 'nixl')]\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_without_ray_or_a_cluster_the_remedy_is_named(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ray", None)
        with pytest.raises(RayMissingError, match=r"pip install 'rdt-transport\[ray\]'"):
            RayWire("reader")
    monkeypatch.setattr(ray, "__version__", "2.58.1")
    with pytest.raises(
        RayMissingError, match=r"the ray wire needs Ray 2\.59 or newer, found 2\.58"
    ):
        RayWire("reader")
    monkeypatch.undo()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RayMissingError, match=r"call ray\.init\(\) first"):
        RayWire("reader")


def test_a_process_that_attached_itself_leaves_with_its_last_wire_and_spins_no_core(cluster):
    """Its own process: what this one's other threads do is not of interest."""
    program = f"""
import time
import ray, torch
from rdt_transport.wire.ray import RayWire
one = RayWire("one", serves=False, address={cluster!r})
two = RayWire("two", serves=False)
one.register([torch.zeros(1000)])
used = time.process_time()
time.sleep(2.0)
used = time.process_time() - used
assert used < 0.5, used
one.close()
assert ray.is_initialized()
two.close()
assert not ray.is_initialized()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "about 60 s after the cluster's head dies" in result.stderr


def test_an_agent_made_before_the_first_wire_is_complained_about(cluster):
    program = f"""
import ray, torch
ray.init(address={cluster!r}, log_to_driver=False)
importlib = __import__("importlib")
importlib.import_module("ray.experimental").register_nixl_memory(torch.zeros(10))
from rdt_transport.wire.ray import RayWire
RayWire("late", serves=False).close()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "keeps a core busy" in result.stderr


def test_the_office_is_sent_by_value_and_loads_no_torch(cluster):
    with PumpedWire(lambda: RayWire("server")) as server:
        office = ray.get_actor(server.name, namespace="rdt")
        loaded = office.__ray_call__.remote(
            lambda _: sorted(importlib.import_module("sys").modules)
        )
        names = ray.get(loaded, timeout=60)
    assert "asyncio" in names
    assert not {"torch", "rdt_transport", "nixl"} & set(names)
