"""The examination: starts probes, has every pair read, and always ends what it started."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rdt_transport.doctor.examination import Examination, Memory, Pair
from rdt_transport.doctor.host import host_facts, num_gpus, versions
from rdt_transport.doctor.host import settings as own_settings
from rdt_transport.doctor.probe_process import ProbeProcess
from rdt_transport.doctor.remote import Offer, visit
from rdt_transport.errors import WireError
from rdt_transport.host_memory import free_host_bytes

__all__ = ["TIMEOUT_SECONDS", "devices", "examine"]

TIMEOUT_SECONDS = 60.0
_Answer = TypeVar("_Answer")


def devices() -> tuple[str, ...]:
    """``cpu``, and every GPU."""
    return ("cpu", *(f"cuda:{number}" for number in range(num_gpus())))


def examine(
    *,
    ring_bytes: int | None = None,
    peer: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Examination:
    """Look at this machine, and at the way to ``peer`` (``host:port``), if one is named.

    Starts two processes a device, each with an agent of its own, and has host memory read host
    memory, and every GPU every GPU. Takes some ten seconds on a CPU. Does not raise for what fails
    on the way: the examination says it.

    Args:
        ring_bytes: that rings shall take on each device.
        peer: where `rdt_transport.doctor.remote.serve` waits.
        timeout_seconds: of every wait.

    Raises:
        WireError: ``peer`` cannot be reached, or does not answer as a doctor.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="rdt-doctor-")))
        host = host_facts()
        offer = undo.enter_context(visit(peer, timeout_seconds)) if peer is not None else None
        # Nothing leaves this host, unless RDMA devices may be what carries reads within it.
        is_loopback = not host.rdma_devices and (offer is None or offer.is_loopback)

        def start(device: str) -> ProbeProcess:
            return undo.enter_context(
                ProbeProcess(
                    device, folder, is_loopback=is_loopback, timeout_seconds=timeout_seconds
                )
            )

        readers = [start(device) for device in devices()]
        sources = [start(device) for device in devices()]
        reader, error = readers[0], None
        try:
            settings = reader.ask("settings")
        except WireError as failure:
            now = dict(os.environ)
            settings, error = own_settings(now, now, now, was_loaded=False), str(failure)
        found = Examination(
            versions=versions(), host=host, settings=settings, agent_error=error,
            ring_bytes=ring_bytes, peer_host=offer.host if offer else None,
        )  # fmt: skip
        if error is not None:
            return found
        pairs = [_pair(one, other, timeout_seconds) for one, other in _pairs(readers, sources)]
        if offer is not None and peer is not None:
            pairs += _remote_pairs(readers, offer, peer, timeout_seconds)
        ucx = _asked(lambda: reader.ask("ucx_version"))
        return replace(
            found,
            versions={**found.versions, **({} if ucx is None else {"ucx": ucx})},
            pairs=tuple(pairs),
            idle_cores=_asked(lambda: reader.ask("idle_cores")),
            memory=(
                Memory("cpu", free_host_bytes()),
                *(Memory(r.device, _asked(lambda r=r: r.ask("free_bytes"))) for r in readers[1:]),
            ),
        )


def _asked(ask: Callable[[], _Answer]) -> _Answer | None:
    try:
        return ask()
    except WireError:
        return None


def _pairs(
    readers: Sequence[ProbeProcess], sources: Sequence[ProbeProcess]
) -> list[tuple[ProbeProcess, ProbeProcess]]:
    gpus = [(reader, source) for reader in readers[1:] for source in sources[1:]]
    return [(readers[0], sources[0]), *gpus]


def _pair(reader: ProbeProcess, source: ProbeProcess, seconds: float) -> Pair:
    pair = Pair(reader.device, source.device)
    try:
        offered = source.ask("source")
        if not pair.is_of_gpus:
            pair = replace(pair, copy_refusal=reader.ask("copy_refusal", offered))
        source.ask("attend", True)
        try:
            reads = reader.ask("reads", offered, not pair.is_of_gpus, seconds)
        finally:
            source.ask("attend", False)
        return replace(pair, reads=reads)
    except WireError as error:
        return replace(pair, error=str(error))


def _remote_pairs(
    readers: Sequence[ProbeProcess], offer: Offer, peer: str, seconds: float
) -> list[Pair]:
    pairs = []
    by_device = {reader.device: reader for reader in readers}
    for device, source in offer.sources.items():
        if device not in by_device:
            continue
        pair = Pair(device, device, peer)
        try:
            reads = by_device[device].ask("reads", source, device == "cpu", seconds)
            pairs.append(replace(pair, reads=reads))
        except WireError as error:
            pairs.append(replace(pair, error=str(error)))
    return pairs
