"""Events: whether the work enqueued so far on a device has completed; and the streams of threads.

The only file of this package that may touch ``torch.cuda``.
"""

import contextlib
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rdt_transport.errors import WireError

__all__ = [
    "CudaEvents",
    "Event",
    "Events",
    "HostEvents",
    "check_has_events",
    "events_of",
    "free_device_bytes",
]


class Event(Protocol):
    """A mark in a device's queue of work; it knows one `Events.record` and no later one."""

    def query(self) -> bool:
        """True once everything enqueued before the mark has completed; never waits."""
        ...


class Events(Protocol):
    """Where events of one device come from, and the streams they are recorded on; any thread."""

    @property
    def device(self) -> torch.device: ...

    def record(self) -> Event:
        """A mark behind everything enqueued on the calling thread's current stream."""
        ...

    def wait(self, event: Event) -> None:
        """What the calling thread enqueues from now on runs after ``event``; returns at once."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """A stream of the calling thread's own, the same each time, is current while open."""
        ...

    def bind(self) -> None:
        """The calling thread uses this device from now on, libraries that ask CUDA included."""
        ...

    def bind_with_stream(self) -> None:
        """As `bind`; and what the thread enqueues goes to its own stream from now on.

        For a thread that is ours alone: switching streams takes as long as a few launches.
        """
        ...


class _Completed:
    __slots__ = ()

    def query(self) -> bool:
        return True


_COMPLETED = _Completed()


class HostEvents:
    """Events of CPU memory, where a call returns when its work is done."""

    device = torch.device("cpu")

    def record(self) -> Event:
        return _COMPLETED

    def wait(self, event: Event) -> None:
        return None

    def stream(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def bind(self) -> None:
        return None

    def bind_with_stream(self) -> None:
        return None


class _CudaEvent:
    """One record of a pooled event, which goes back to its pool when nobody holds this any more."""

    __slots__ = ("_completed", "_pool", "mark")

    def __init__(self, mark: torch.cuda.Event, pool: deque[torch.cuda.Event]) -> None:
        self.mark = mark
        self._pool = pool
        self._completed = False

    def query(self) -> bool:
        if not self._completed:
            self._completed = self.mark.query()
        return self._completed

    def __del__(self) -> None:
        # A stream that waits for the mark goes on waiting for what it was when `wait` was called.
        self._pool.append(self.mark)


class _OfThread(threading.local):
    """A thread's own stream, once it has one, and whether it is its current one for good."""

    stream: torch.cuda.Stream | None = None
    is_bound = False


class CudaEvents:
    """Events of one GPU, without timing, pooled.

    Args:
        device: "cuda", which is the calling thread's current one, or "cuda:n".

    Raises:
        WireError: this torch finds no GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        found = torch.device(device)
        if not torch.cuda.is_available():
            raise WireError(
                f"device {str(device)!r}: this torch ({torch.__version__}) finds no GPU; use "
                "device='cpu', or install a build for CUDA"
            )
        index = torch.cuda.current_device() if found.index is None else found.index
        self.device = torch.device("cuda", index)
        self._pool: deque[torch.cuda.Event] = deque()  # its ends are thread-safe
        self._of_thread = _OfThread()

    def record(self) -> Event:
        try:
            mark = self._pool.pop()
        except IndexError:
            mark = torch.cuda.Event()
        self._current().record_event(mark)
        return _CudaEvent(mark, self._pool)

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self._current().wait_event(event.mark)

    def stream(self) -> AbstractContextManager[None]:
        if self._of_thread.is_bound:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._own())

    def bind(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.current_stream(self.device).query()  # a call makes the context the thread's

    def bind_with_stream(self) -> None:
        self.bind()
        torch.cuda.set_stream(self._own())
        self._of_thread.is_bound = True

    def _own(self) -> torch.cuda.Stream:
        if self._of_thread.stream is None:
            self._of_thread.stream = torch.cuda.Stream(self.device)
        return self._of_thread.stream

    def _current(self) -> torch.cuda.Stream:
        if self._of_thread.is_bound:  # asking torch takes longer than recording an event
            return self._own()
        return torch.cuda.current_stream(self.device)


def events_of(device: torch.device | str) -> Events:
    """The events of a device; raises `WireError` for one that has none here."""
    check_has_events(device)
    return HostEvents() if torch.device(device).type == "cpu" else CudaEvents(device)


def check_has_events(device: torch.device | str) -> None:
    """Refuse memory whose work no events here know of.

    Raises `WireError` for any device but the CPU and a GPU of CUDA.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        name = kind.upper()
        raise WireError(
            f"device {str(device)!r}: {name} memory needs {name} events, which this version does "
            "not have; use device='cpu' or 'cuda'"
        )


def free_device_bytes(device: torch.device | str) -> int:
    """Bytes that can be allocated on a GPU, once torch has given back what it only keeps."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
