"""Events: whether the work enqueued so far on a device has completed, asked without waiting.

The only file of this package that may touch ``torch.cuda``.
"""

from typing import Protocol

import torch

from rdt_transport.errors import WireError

__all__ = ["Event", "Events", "HostEvents", "check_has_events"]


class Event(Protocol):
    """A mark in a device's queue of work; it knows one `Events.record` and no later one."""

    def query(self) -> bool:
        """True once everything enqueued before the mark has completed; never waits."""
        ...


class Events(Protocol):
    """Where events come from."""

    def record(self) -> Event:
        """A mark behind everything the calling thread has enqueued; any thread."""
        ...


class _Completed:
    __slots__ = ()

    def query(self) -> bool:
        return True


_COMPLETED = _Completed()


class HostEvents:
    """Events of CPU memory, where a call returns when its work is done."""

    def record(self) -> Event:
        return _COMPLETED


def check_has_events(device: torch.device | str) -> None:
    """Refuse memory whose work `HostEvents` would call complete while it still runs.

    Raises `WireError` for any device but the CPU.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        name = kind.upper()
        raise WireError(
            f"device {str(device)!r}: {name} memory needs {name} events, which this version does "
            "not have; use device='cpu'"
        )
