"""The hardware's limit: the same tensors read by prepared handles, with no protocol around them.

Two processes, as a trainer and its worker are: one only polls, the other posts one prepared read a
layer, all at once, into tensors fused as a worker's are, and waits for the last. Read once with a
descriptor a tensor (two handles a layer, so that no neighbours meet in one), and once merged.
"""

import multiprocessing as mp
import re
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from bench.gpu.devices import bound, synchronize
from bench.gpu.models import MODELS, Shapes, fill, modules_of

__all__ = ["RawReads", "raw_reads"]

TIMEOUT_SECONDS = 120.0
VERSION = 7

_FUSED = (
    (r"\.experts\.\d+\.(gate|up)_proj", ".w13"),
    (r"\.experts\.\d+\.down_proj", ".w2"),
    (r"\.mlp\.(gate|up)_proj", ".gate_up"),
    (r"\.(q|k|v)_proj", ".qkv"),
)


class RawReads(NamedTuple):
    """One way to read all tensors: the seconds of each round, and in how many pieces."""

    how: str
    seconds: list[float]
    num_handles: int
    num_regions: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def raw_reads(
    kind: str, tiny: bool, devices: tuple[str, str], num_threads: int, rounds: int = 5
) -> list[RawReads]:
    """Both ways, posted by that many threads (0: by the caller's), after two rounds not counted.

    From the first device to the second.

    Raises `RuntimeError` when a process died, hung, or read other bytes than were there.
    """
    context = mp.get_context("spawn")
    holder_end, held = context.Pipe()
    reader_end, reading = context.Pipe()
    with ExitStack() as stack:
        for work, connection, device, extra in (
            (_hold, held, devices[0], ()),
            (_read, reading, devices[1], (num_threads, rounds)),
        ):
            arguments = (work, connection, kind, tiny, device, *extra)
            process = context.Process(target=_run, args=arguments)
            process.start()
            stack.callback(_end, process)
        reader_end.send(_received(holder_end))
        found = _received(reader_end)
        holder_end.send("done")
    return found


def _run(work: Callable[..., None], connection: Connection, *args: Any) -> None:
    try:
        work(connection, *args)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def _received(connection: Connection) -> Any:
    if not connection.poll(TIMEOUT_SECONDS):
        raise RuntimeError(f"a process of the raw reads was silent for {TIMEOUT_SECONDS:g} s")
    found = connection.recv()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _shapes(kind: str, tiny: bool, device: str) -> Shapes:
    bound(device)
    return (MODELS[kind].tiny() if tiny else MODELS[kind]).shapes()


def _fused(shapes: Shapes, device: str) -> dict[str, torch.Tensor]:
    """A tensor a name, those that a worker fuses in one piece of memory, in their order."""
    names: dict[str, list[str]] = {}
    for name in shapes:
        whole = name
        for pattern, fused in _FUSED:
            whole = re.sub(pattern, fused, whole)
        names.setdefault(whole, []).append(name)
    tensors = {}
    for parts in names.values():
        counts = [torch.Size(shapes[name]).numel() for name in parts]
        memory = torch.empty(sum(counts), dtype=torch.bfloat16, device=device)
        for name, piece in zip(parts, memory.split(counts), strict=True):
            tensors[name] = piece.view(shapes[name])
    return tensors


def _regions(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, int, int]]:
    """By name, where a tensor lies: (address, bytes, index of its device)."""
    return {
        name: (tensor.data_ptr(), tensor.nbytes, tensor.device.index or 0)
        for name, tensor in tensors.items()
    }


def _hold(connection: Connection, kind: str, tiny: bool, device: str) -> None:
    from rdt_transport.wire.nixl import NixlWire

    module = modules_of(_shapes(kind, tiny, device), device)
    tensors = {name: each.detach() for name, each in module.named_parameters()}
    for name, tensor in tensors.items():
        fill(tensor, name, VERSION)
    synchronize(device)
    wire = NixlWire("bench")
    wire.register(list(tensors.values()))
    connection.send((wire.address(), _regions(tensors)))
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not connection.poll() and time.monotonic() < deadline:
        wire.poll()
    wire.close()


def _read(
    connection: Connection, kind: str, tiny: bool, device: str, num_threads: int, rounds: int
) -> None:
    from rdt_transport.wire.base import Region
    from rdt_transport.wire.nixl import NixlWire

    tensors = _fused(_shapes(kind, tiny, device), device)
    wire = NixlWire("bench", num_threads=num_threads)
    wire.register(list(tensors.values()))
    peer, theirs = _received(connection)
    wire.connect(peer, TIMEOUT_SECONDS)
    layers: dict[str, list[Any]] = {}
    for name, here in _regions(tensors).items():
        pair = Region(*here), Region(*theirs[name])
        layers.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(pair)
    found = []
    for how, step in (("a tensor each", 2), ("merged", 1)):
        parts = [pairs[at::step] for pairs in layers.values() for at in range(step)]
        handles: list[Any] = [wire.prepare_read(peer.name, part) for part in parts if part]
        for tensor in tensors.values():
            tensor.zero_()
        synchronize(device)
        seconds = [_seconds(wire, handles) for _ in range(rounds + 2)][2:]
        found.append(RawReads(how, seconds, len(handles), sum(h.num_regions for h in handles)))
        for handle in handles:
            wire.release(handle)
        if not all(_is_right(name, tensor) for name, tensor in tensors.items()):
            raise RuntimeError(f"the raw reads, {how}, landed other bytes than were there")
    wire.disconnect(peer.name)
    wire.close()
    connection.send(found)


def _seconds(wire: Any, handles: list[Any]) -> float:
    began = time.perf_counter()
    for handle in handles:
        wire.post(handle, b"read")
    left = len(handles)
    while left:
        left -= len(wire.poll())
        if time.perf_counter() - began > TIMEOUT_SECONDS:
            raise RuntimeError(f"{left} raw reads did not end")
    return time.perf_counter() - began


def _is_right(name: str, tensor: torch.Tensor) -> bool:
    expected = fill(torch.empty_like(tensor), name, VERSION)
    return torch.equal(expected.view(torch.int16), tensor.view(torch.int16))
