"""Two connected wires and the words that the checks of a wire are written with."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from rdt_transport.errors import WireError
from rdt_transport.testing.pumped_wire import PumpedWire
from rdt_transport.wire.base import ReadDone, ReadHandle, Region, Wire

__all__ = [
    "MakeWire",
    "connect",
    "connected_pair",
    "expect",
    "expect_bytes",
    "expect_refused",
    "prepare",
    "random_bytes",
    "read",
    "region_of",
]

MakeWire = Callable[[str], Wire]
"""Makes a wire of a role."""

CONNECT_SECONDS = 20.0


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    """uint8, 1-D, reproducible."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def region_of(buffer: torch.Tensor, start: int = 0, num_bytes: int | None = None) -> Region:
    """``num_bytes`` of a uint8 buffer from ``start`` (all the rest when None)."""
    length = buffer.numel() - start if num_bytes is None else num_bytes
    return Region(buffer.data_ptr() + start, length, buffer.device.index or 0)


@contextmanager
def connected_pair(
    make_wire: MakeWire, source: torch.Tensor, target: torch.Tensor
) -> Generator[tuple[PumpedWire, PumpedWire]]:
    """(reader, server): ``target`` and ``source`` registered, and connected both ways."""
    with (
        PumpedWire(lambda: make_wire("server")) as server,
        PumpedWire(lambda: make_wire("reader")) as reader,
    ):
        server.call(lambda wire: wire.register([source]))
        reader.call(lambda wire: wire.register([target]))
        connect(reader, server)
        connect(server, reader)
        yield reader, server


def connect(one: PumpedWire, other: PumpedWire) -> None:
    address = other.call(lambda wire: wire.address())
    one.call(lambda wire: wire.connect(address, CONNECT_SECONDS))


def prepare(reader: PumpedWire, server: PumpedWire, local: Region, remote: Region) -> ReadHandle:
    return reader.call(lambda wire: wire.prepare_read(server.name, [(local, remote)]))


def read(reader: PumpedWire, handle: ReadHandle, notification: bytes = b"read") -> None:
    reader.call(lambda wire: wire.post(handle, notification))
    (event,) = reader.take(1)
    expect(event == ReadDone(handle), f"expected one ReadDone, found {event}")


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def expect_bytes(found: torch.Tensor, expected: torch.Tensor) -> None:
    expect(torch.equal(found, expected), "the bytes differ")


def expect_refused(what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except WireError:
        return
    raise AssertionError(f"expected a WireError, found none: {what}")
