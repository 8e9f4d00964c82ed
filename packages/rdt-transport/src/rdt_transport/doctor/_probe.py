"""What runs in a process of the doctor: one wire, one arena of one device, and its measurements."""

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rdt_transport.doctor.cma import copy_refusal
from rdt_transport.doctor.examination import Reads, Setting
from rdt_transport.doctor.host import settings, ucx_library, ucx_version
from rdt_transport.doctor.ucx_report import log_transports, read_path
from rdt_transport.errors import WireTimeoutError
from rdt_transport.events import events_of, free_device_bytes
from rdt_transport.memory import Arena
from rdt_transport.progress import ProgressThread
from rdt_transport.wire.base import PeerAddress, ReadDone, ReadFailed, ReadHandle, Region
from rdt_transport.wire.nixl import NixlWire

__all__ = ["Probe", "Source", "serve_probe"]

LARGE_BYTES = 64 << 20
SMALL_BYTES = 4 << 10
_ROUNDS = 200
_BUDGET_SECONDS = 1.0
_POLL_SECONDS = 0.01
_BUSY_SECONDS = 20e-6  # between polls, on both sides: who spins loses the processor on a busy host
_SETTLE_SECONDS = 1.5  # a progress thread polls faster for a second after anything happened
_IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """What a reader needs to know of who is read: its wire, its bytes, and its process."""

    address: PeerAddress
    region: Region
    pid: int


def _pattern(device: str) -> torch.Tensor:
    """What a source holds: `LARGE_BYTES` of uint8, without a period that a page has."""
    return torch.arange(LARGE_BYTES, device=device).remainder_(251).to(torch.uint8)


class Probe:
    """One agent and an arena of two slots, made as a job makes its rings.

    Args:
        device: ``cpu`` or ``cuda:0``.
        folder: where UCX writes what it chose.
        is_loopback: whether UCX may use no other network, unless the user said which.
    """

    def __init__(self, device: str, folder: Path, is_loopback: bool) -> None:
        torch.set_num_threads(1)  # a read is the work of one thread, and so is the copy beside it
        started = dict(os.environ)
        log_transports(folder)
        if is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        prepared = dict(os.environ)
        self._log = folder / f"ucx-{os.getpid()}.log"
        self._device = device
        events_of(device).bind()
        was_loaded = ucx_library() is not None
        self.wire = NixlWire(f"doctor-{device.replace(':', '')}")
        self._settings = settings(started, prepared, dict(os.environ), was_loaded)
        self._arena = Arena(2, LARGE_BYTES, device)
        self.wire.register([self._arena.buffer])

    def settings(self) -> tuple[Setting, ...]:
        """The environment of this process, and who set what."""
        return self._settings

    def ucx_version(self) -> str | None:
        return ucx_version()

    def source(self) -> Source:
        """Fill slot 0, to be read by others."""
        self._arena.slot(0).copy_(_pattern(self._device))
        self._synchronize()
        return Source(self.wire.address(), self._arena.region(0), os.getpid())

    def copy_refusal(self, source: Source) -> str | None:
        """Why the kernel does not let this process copy what ``source`` holds; host memory only."""
        return copy_refusal(source.pid, source.region.address)

    def free_bytes(self) -> int | None:
        """Of this process's GPU."""
        return free_device_bytes(self._device)

    def idle_cores(self) -> float:
        """Processor seconds a second of one more agent, which idles on a progress thread."""
        with closing(ProgressThread(lambda: NixlWire("idle"), name="idle")):
            time.sleep(_SETTLE_SECONDS)
            spent, began = time.process_time(), time.perf_counter()
            time.sleep(_IDLE_SECONDS)
            return (time.process_time() - spent) / (time.perf_counter() - began)

    def reads(self, source: Source, is_host: bool, timeout_seconds: float) -> Reads:
        """Read ``source`` again and again, and see what UCX does it with.

        Args:
            source: the process to read, which polls its wire meanwhile.
            is_host: whether it holds memory of the host.
            timeout_seconds: of all of it.
        """
        deadline = time.monotonic() + timeout_seconds
        said_before = len(self._said())
        peer = source.address.name
        self.wire.connect(source.address, timeout_seconds)
        large, small = (self._prepare(source, size) for size in (LARGE_BYTES, SMALL_BYTES))
        target, other = self._arena.slot(0), self._arena.slot(1)
        target.zero_()
        self._synchronize()
        self._read(large, deadline)
        self._synchronize()
        is_equal = torch.equal(target, _pattern(self._device))
        on_host = {"into_host": self._device == "cpu", "from_host": is_host}
        said = self._said()
        path = read_path(said[said_before:], **on_host) or read_path(said, **on_host)

        def copy() -> None:
            other.copy_(target)
            self._synchronize()

        whole, copies = _medians([lambda: self._read(large, deadline), copy])
        (trip,) = _medians([lambda: self._read(small, deadline)])
        for handle in (large, small):
            self.wire.release(handle)
        self.wire.disconnect(peer)
        return Reads(
            transport=path.transport if path else "unknown",
            how=path.how if path else "unknown",
            is_emulated=path is not None and path.is_emulated,
            is_equal=is_equal,
            small_seconds=trip,
            bytes_per_second=LARGE_BYTES / whole,
            copy_bytes_per_second=LARGE_BYTES / copies,
        )

    def _prepare(self, source: Source, num_bytes: int) -> ReadHandle:
        local, remote = (
            Region(region.address, num_bytes, region.device)
            for region in (self._arena.region(0), source.region)
        )
        return self.wire.prepare_read(source.address.name, [(local, remote)])

    def _read(self, handle: ReadHandle, deadline: float) -> None:
        self.wire.post(handle, b"read")
        while True:
            for event in self.wire.poll():
                if event == ReadDone(handle):
                    return
                if isinstance(event, ReadFailed):
                    raise WireTimeoutError(f"reading {handle.peer_name}: {event.reason}")
            if time.monotonic() > deadline:
                raise WireTimeoutError(
                    f"a read from {handle.peer_name} has not ended by the deadline; raise --timeout"
                )
            time.sleep(_BUSY_SECONDS)

    def _said(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX writes into a buffer of the C library
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize(torch.device(self._device))


def _medians(actions: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each, taken in turn, over about `_BUDGET_SECONDS` in all."""
    taken: list[list[float]] = [[] for _ in actions]
    ends = time.perf_counter() + _BUDGET_SECONDS
    for _ in range(_ROUNDS):
        for action, seconds in zip(actions, taken, strict=True):
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        if time.perf_counter() > ends:
            break
    return [statistics.median(seconds) for seconds in taken]


def serve_probe(connection: Connection, device: str, folder: str, is_loopback: bool) -> None:
    """Answer requests until told to end, or until who asks is gone.

    The first answer says whether the probe could be made. In between the wire is polled: eagerly
    while others read (``attend``), a hundred times a second otherwise.
    """
    pause = _POLL_SECONDS
    try:
        probe = Probe(device, Path(folder), is_loopback)
        connection.send((True, None))
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))
        return
    with closing(probe.wire):
        while True:
            try:
                while not connection.poll(0.0):  # which rounds a pause up to milliseconds
                    probe.wire.poll()
                    time.sleep(pause)
                request = connection.recv()
                if request is None:
                    return
                method, arguments = request
                if method == "attend":
                    (attending,) = arguments
                    pause = _BUSY_SECONDS if attending else _POLL_SECONDS
                    connection.send((True, None))
                    continue
                connection.send((True, getattr(probe, method)(*arguments)))
            except EOFError:
                return
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
