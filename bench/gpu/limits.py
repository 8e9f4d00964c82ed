"""The hardware's limit: the same tensors read by prepared handles, with no protocol around them.

Two processes, as a trainer and its worker are: one only polls, the other posts one prepared read a
layer, all at once, into tensors of the same shapes, and waits for the last.
"""

import multiprocessing as mp
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.gpu.models import MODELS, fill, modules_of

__all__ = ["raw_read_seconds"]

TIMEOUT_SECONDS = 120.0
VERSION = 7


def raw_read_seconds(kind: str, tiny: bool, device: str, rounds: int = 5) -> list[float]:
    """The seconds of each round, after two that are not counted.

    Raises `RuntimeError` when a process died, hung, or read other bytes than were there.
    """
    context = mp.get_context("spawn")
    holder_end, held = context.Pipe()
    reader_end, reading = context.Pipe()
    with ExitStack() as stack:
        for work, connection, extra in (
            (_hold, held, ()),
            (_read, reading, (rounds,)),
        ):
            process = context.Process(target=work, args=(connection, kind, tiny, device, *extra))
            process.start()
            stack.callback(_end, process)
        reader_end.send(_received(holder_end))
        found = _received(reader_end)
        holder_end.send("done")
    if not found["right"]:
        raise RuntimeError("the raw reads landed other bytes than were there")
    return found["seconds"]


def _received(connection: Connection) -> Any:
    if not connection.poll(TIMEOUT_SECONDS):
        raise RuntimeError(f"a process of the raw reads was silent for {TIMEOUT_SECONDS:g} s")
    return connection.recv()


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _open(kind: str, tiny: bool, device: str) -> tuple[dict[str, torch.Tensor], Any]:
    from rdt_transport.wire.nixl import NixlWire

    if device == "cuda":
        torch.cuda.set_device(0)
    model = MODELS[kind].tiny() if tiny else MODELS[kind]
    module = modules_of(model.shapes(), device)
    tensors = {name: each.detach() for name, each in module.named_parameters()}
    wire = NixlWire("bench")
    wire.register(list(tensors.values()))
    return tensors, wire


def _regions(tensors: dict[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]]:
    """By layer, where its tensors lie: (address, bytes)."""
    layers: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if ".layers." in name else name
        region = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        layers.setdefault(layer, []).append(region)
    return layers


def _hold(connection: Connection, kind: str, tiny: bool, device: str) -> None:
    tensors, wire = _open(kind, tiny, device)
    for name, tensor in tensors.items():
        fill(tensor, name, VERSION)
    if device == "cuda":
        torch.cuda.synchronize()
    connection.send((wire.address(), _regions(tensors)))
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not connection.poll() and time.monotonic() < deadline:
        wire.poll()
    wire.close()


def _read(connection: Connection, kind: str, tiny: bool, device: str, rounds: int) -> None:
    from rdt_transport.wire.base import Region

    tensors, wire = _open(kind, tiny, device)
    peer, theirs = _received(connection)
    wire.connect(peer, TIMEOUT_SECONDS)
    handles = []
    for layer, regions in _regions(tensors).items():
        pairs = [
            (Region(here, num_bytes), Region(there, num_bytes))
            for (here, num_bytes), (there, _) in zip(regions, theirs[layer], strict=True)
        ]
        handles.append(wire.prepare_read(peer.name, pairs))
    seconds = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        for handle in handles:
            wire.post(handle, b"read")
        left = len(handles)
        while left:
            left -= len(wire.poll())
            if time.perf_counter() - began > TIMEOUT_SECONDS:
                raise RuntimeError(f"{left} raw reads did not end")
        seconds.append(time.perf_counter() - began)
    right = True
    for name, tensor in tensors.items():
        expected = fill(torch.empty_like(tensor), name, VERSION)
        right &= torch.equal(expected.view(torch.int16), tensor.view(torch.int16))
    for handle in handles:
        wire.release(handle)
    wire.disconnect(peer.name)
    wire.close()
    connection.send({"seconds": seconds[2:], "right": right})
