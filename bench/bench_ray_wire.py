"""The ray wire against the nixl wire, between two processes of this host: one table, one JSON line.

Run with `UCX_NET_DEVICES=lo python -m bench.bench_ray_wire`; starts a Ray cluster of its own.
Absolute numbers are this machine's; the JSON line has ratios, measured one after the other.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import ray
import torch

from bench.bench_wire import LARGE_BYTES, SMALL_BYTES, seconds
from rdt_transport.testing.peer_process import PeerProcess
from rdt_transport.wire.base import ReadDone, ReadHandle, Region, RegionPair, Wire
from rdt_transport.wire.nixl import NixlWire
from rdt_transport.wire.ray import RayWire

ROUNDS = 100
PAUSE_SECONDS = 50e-6  # of a progress thread in an open epoch; Python's lock is free meanwhile
NUM_REGIONS = 1000
CONNECT_SECONDS = READ_SECONDS = 60.0
CASES = {
    "one region of 4 KiB": (SMALL_BYTES, 1),
    "1000 regions of 4 KiB": (SMALL_BYTES, NUM_REGIONS),
    "one region of 64 MiB": (LARGE_BYTES, 1),
}


def pairs(target: torch.Tensor, remote: Region, num_bytes: int, count: int) -> list[RegionPair]:
    """Regions apart from each other, whose order is the other way round at the peer."""
    step = LARGE_BYTES // NUM_REGIONS
    return [
        (
            Region(target.data_ptr() + at * step, num_bytes),
            Region(remote.address + (count - 1 - at) * step, num_bytes),
        )
        for at in range(count)
    ]


def read(wire: Wire, handle: ReadHandle) -> None:
    wire.post(handle, b"done")
    deadline = time.monotonic() + READ_SECONDS
    while ReadDone(handle) not in wire.poll():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {READ_SECONDS} s for a read from {handle.peer_name}")
        time.sleep(PAUSE_SECONDS)


def medians(serve: Callable[[str], Wire], wire: Wire) -> dict[str, float]:
    """Median seconds of each case, after one that is not counted; closes ``wire``."""
    target = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    found = {}
    with PeerProcess(serve, num_bytes=LARGE_BYTES, poll_seconds=0.0002) as peer:
        address, remote = peer.ask("address"), peer.ask("region")
        wire.register([target])
        wire.connect(address, CONNECT_SECONDS)
        for name, (num_bytes, count) in CASES.items():
            handle = wire.prepare_read(address.name, pairs(target, remote, num_bytes, count))
            read(wire, handle)
            times = [seconds(partial(read, wire, handle)) for _ in range(ROUNDS)]
            found[name] = statistics.median(times)
        wire.close()
        peer.stop()
    return found


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    cluster = ray.get_runtime_context().gcs_address
    over_nixl = medians(NixlWire, NixlWire("bench"))
    over_ray = medians(partial(RayWire, address=cluster), RayWire("bench", serves=False))
    ray.shutdown()

    print(f"{'read, and its end told to the peer':36} {'nixl':>12} {'ray':>12}")
    for name, duration in over_nixl.items():
        print(f"{name:36} {duration * 1e3:9.3f} ms {over_ray[name] * 1e3:9.3f} ms")
    small, regions, large = (over_ray[name] / over_nixl[name] for name in CASES)
    one, many, _ = over_ray.values()
    ratios = {
        "small_ray_to_nixl": round(small, 1),
        "regions_ray_to_nixl": round(regions, 1),
        "large_ray_to_nixl": round(large, 2),
        "ray_regions_to_one": round(many / one, 1),
    }
    print(json.dumps({"bench": "ray_wire", **ratios}))


if __name__ == "__main__":
    main()
