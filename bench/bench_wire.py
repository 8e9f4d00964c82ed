"""The nixl wire between two processes of this host: one table, then one JSON line.

Run with `UCX_NET_DEVICES=lo python bench/bench_wire.py`. Absolute numbers are this machine's; the
JSON line has ratios, measured side by side; that of the large read moves with the machine's load.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from rdt_transport.wire.base import Notification, ReadDone, ReadHandle, Region, Wire
from rdt_transport.wire.nixl import NixlWire

LARGE_BYTES = 64 << 20
SMALL_BYTES = 4 << 10
IDLE_POLL_SECONDS = 0.05
ROUNDS = 15
SECONDS = 30.0


def echo(connection: Connection) -> None:
    """Serve `LARGE_BYTES`; idle until told to be eager, then send every message back."""
    wire = NixlWire("echo")
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    wire.register([source])
    connection.send((wire.address(), Region(source.data_ptr(), LARGE_BYTES)))
    while not connection.poll(IDLE_POLL_SECONDS):
        wire.poll()
    wire.connect(connection.recv(), SECONDS)
    connection.send(None)
    while True:
        for event in wire.poll():
            if isinstance(event, Notification) and event.message == b"end":
                wire.close()
                return
            if isinstance(event, Notification) and event.message == b"echo":
                wire.notify(event.sender, b"echo")


def until(wire: Wire, wanted: object) -> None:
    """Poll until the wire reports ``wanted``."""
    deadline = time.monotonic() + SECONDS
    while wanted not in wire.poll():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {SECONDS} s for {wanted}")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def read(wire: Wire, handle: ReadHandle) -> None:
    wire.post(handle, b"done")
    until(wire, ReadDone(handle))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs,), daemon=True)
    process.start()
    peer, remote = connection.recv()
    wire = NixlWire("bench")
    target = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    other = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    wire.register([target])
    connect = seconds(lambda: wire.connect(peer, SECONDS))
    connection.send(wire.address())
    while not connection.poll(0.0):
        wire.poll()

    def prepare(num_bytes: int) -> ReadHandle:
        local = Region(target.data_ptr(), num_bytes)
        return wire.prepare_read(peer.name, [(local, Region(remote.address, num_bytes))])

    def round_trip() -> None:
        wire.notify(peer.name, b"echo")
        until(wire, Notification(peer.name, b"echo"))

    large, small = prepare(LARGE_BYTES), prepare(SMALL_BYTES)
    read(wire, large)  # touch every page once
    assert torch.equal(target, other)
    trips = [seconds(round_trip) for _ in range(1000)]
    smalls = [seconds(lambda: read(wire, small)) for _ in range(1000)]
    larges, copies = [], []
    for _ in range(ROUNDS):
        larges.append(seconds(lambda: read(wire, large)))
        copies.append(seconds(lambda: target.copy_(other)))
    wire.notify(peer.name, b"end")
    process.join(SECONDS)
    wire.close()

    trip, repost, whole, copy = map(statistics.median, (trips, smalls, larges, copies))
    print(f"{'connect, peer polls every 50 ms':36} {connect * 1e3:10.1f} ms")
    print(f"{'notification there and back':36} {trip * 1e6:10.1f} us")
    print(f"{'read of 4 KiB, posted again':36} {repost * 1e6:10.1f} us")
    print(f"{'read of 64 MiB':36} {LARGE_BYTES / whole / 1e9:10.2f} GB/s")
    print(f"{'copy of 64 MiB in one process':36} {LARGE_BYTES / copy / 1e9:10.2f} GB/s")
    ratios = {
        "read_to_copy_speed": round(copy / whole, 3),
        "connect_to_idle_poll": round(connect / IDLE_POLL_SECONDS, 2),
        "small_read_to_round_trip": round(repost / trip, 2),
    }
    print(json.dumps({"bench": "wire", "backend": "UCX", **ratios}))


if __name__ == "__main__":
    main()
