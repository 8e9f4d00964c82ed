"""Two doctors, one on each machine: one serves random-looking bytes, the other one reads them.

Whoever connects to the serving one gets a single line of JSON, which says how to read it, and keeps
the connection open while it reads. Nothing is taken from the network but that line's fields.
"""

import base64
import ipaddress
import json
import socket
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rdt_transport.doctor._probe import Source
from rdt_transport.doctor.examination import HostFacts
from rdt_transport.doctor.host import host_facts
from rdt_transport.doctor.probe_process import ProbeProcess
from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.wire.base import PeerAddress, Region

__all__ = ["Offer", "decode_offer", "encode_offer", "parse_address", "serve", "visit"]

_SCHEMA = 1
_LONGEST_LINE = 4 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """What the serving doctor says: its host, and whom to read for each device."""

    host: HostFacts
    sources: dict[str, Source]
    is_loopback: bool = False


def encode_offer(offer: Offer) -> bytes:
    """One line."""
    sources = {
        device: {
            "name": source.address.name,
            "metadata": base64.b64encode(source.address.metadata).decode(),
            "region": asdict(source.region),
            "pid": source.pid,
        }
        for device, source in offer.sources.items()
    }
    record = {"schema": _SCHEMA, "host": asdict(offer.host), "sources": sources}
    return json.dumps(record).encode() + b"\n"


def decode_offer(line: bytes, is_loopback: bool = False) -> Offer:
    """The same back; raises `WireError` for anything else."""
    try:
        record = json.loads(line)
        if record["schema"] != _SCHEMA:
            raise WireError(
                f"the other doctor speaks schema {record['schema']}, this one {_SCHEMA}; "
                "install the same release on both machines"
            )
        return Offer(_host(record["host"]), _sources(record["sources"]), is_loopback)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:  # fmt: skip
        raise WireError(f"that is no rdt-doctor --serve: {error!r}") from error


def _host(record: dict[str, Any]) -> HostFacts:
    fields: dict[str, Any] = {**record, "rdma_devices": tuple(record["rdma_devices"])}
    return HostFacts(**fields)


def _sources(record: dict[str, Any]) -> dict[str, Source]:
    return {
        device: Source(
            PeerAddress(str(each["name"]), base64.b64decode(each["metadata"], validate=True)),
            Region(**{name: int(number) for name, number in each["region"].items()}),
            int(each["pid"]),
        )
        for device, each in record.items()
    }


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, with brackets around an IPv6 address; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected host:port, found {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def visit(address: str, timeout_seconds: float) -> Generator[Offer]:
    """Connect to a serving doctor, and keep it serving inside of the ``with``.

    Raises:
        ValueError: ``address`` is no ``host:port``.
        WireError: nobody serves there, or something else does.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), timeout_seconds)
    except OSError as error:
        raise WireError(
            f"no doctor at {address}: {error}; start rdt-doctor --serve there, listening on an "
            "address that this machine reaches"
        ) from error
    with connection:
        yield decode_offer(_read_line(connection, address, timeout_seconds), _is_loopback(host))


def _read_line(connection: socket.socket, address: str, timeout_seconds: float) -> bytes:
    deadline = time.monotonic() + timeout_seconds
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            got = connection.recv(1 << 16)
        except OSError as error:
            raise WireError(f"{address} sent no whole line: {error}") from error
        line += got
        if not got or len(line) > _LONGEST_LINE:
            raise WireError(f"{address} sent {len(line)} bytes and no line; is it a doctor?")
    return line


def serve(
    host: str,
    port: int,
    devices: tuple[str, ...],
    *,
    announce: Callable[[str], None],
    timeout_seconds: float,
) -> None:
    """Let one other doctor read from here, until it goes.

    Args:
        host: address to listen on; loopback reaches this machine only.
        port: 0 takes a free one.
        devices: whose memory to serve.
        announce: called with ``host:port`` once it can be visited.
        timeout_seconds: to wait for the visitor, and again for its end.

    Raises:
        WireError: no agent came up, or nothing may listen there.
        WireTimeoutError: nobody came, or it did not go.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="rdt-doctor-")))
        facts = host_facts()
        is_loopback = not facts.rdma_devices and _is_loopback(host)
        probes = [
            undo.enter_context(
                ProbeProcess(
                    device, folder, is_loopback=is_loopback, timeout_seconds=timeout_seconds
                )
            )
            for device in devices
        ]
        sources = {probe.device: probe.ask("source") for probe in probes}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = undo.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            raise WireError(f"cannot listen on {host}:{port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        announce(f"{shown}:{listener.getsockname()[1]}")
        listener.settimeout(timeout_seconds)
        try:
            visitor, _ = listener.accept()
            undo.enter_context(visitor)
            for probe in probes:
                probe.ask("attend", True)
            visitor.settimeout(timeout_seconds)
            visitor.sendall(encode_offer(Offer(facts, sources)))
            while visitor.recv(1):
                pass
        except TimeoutError as error:
            raise WireTimeoutError(
                f"waited {timeout_seconds:g} s for another doctor to come, or to go"
            ) from error
        except OSError:
            return  # it has gone
