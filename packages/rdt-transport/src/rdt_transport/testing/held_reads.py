"""An in-process wire whose reads end when a test says so: their bytes are copied only then."""

import threading

from rdt_transport.wire.base import Notification, ReadDone, ReadFailed
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

__all__ = ["HeldReads", "HeldWire"]


class HeldReads:
    """Makes wires of one fabric; posted reads of the roles in ``held`` wait until `let_go`.

    Args:
        held: roles, as they are given to a call of this.
    """

    def __init__(self, *held: str) -> None:
        self._fabric = InProcessFabric(read_polls=1)
        self._held = set(held)
        self.posted = threading.Event()
        """Set when a held read has been posted."""
        self.open = threading.Event()

    def __call__(self, role: str) -> InProcessWire:
        if role in self._held:
            return HeldWire(self._fabric, role, self)
        return InProcessWire(self._fabric, role)

    def let_go(self) -> None:
        """All held reads end at the next poll of their wire, and later ones are not held."""
        self.open.set()


class HeldWire(InProcessWire):
    """Reads no byte while it is held."""

    def __init__(self, fabric: InProcessFabric, role: str, reads: HeldReads) -> None:
        super().__init__(fabric, role)
        self._reads = reads

    def poll(self) -> list[ReadDone | ReadFailed | Notification]:
        if not self._in_flight or self._reads.open.is_set():
            return super().poll()
        self._reads.posted.set()
        held, self._in_flight = self._in_flight, {}
        try:
            return super().poll()
        finally:
            self._in_flight = held
