"""The endpoint: what a session is to the progress thread of its wire."""

from typing import Protocol

from rdt_plan.doorbell import Doorbell
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["Endpoint"]


class Endpoint(Protocol):
    """A session on a wire. Everything here is called on the progress thread, and must not block."""

    @property
    def incarnation(self) -> bytes:
        """16 bytes; doorbells for this receiver are delivered here."""
        ...

    def on_doorbell(self, wire: Wire, sender: str, doorbell: Doorbell) -> None:
        """A doorbell for this endpoint arrived from the wire called ``sender``."""
        ...

    def on_read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        """A read of a handle this endpoint owns has ended."""
        ...

    def on_poll(self, wire: Wire) -> None:
        """Once every loop: query events, look at deadlines."""
        ...

    def is_busy(self) -> bool:
        """Whether the wire must be polled eagerly for this endpoint."""
        ...

    def is_urgent(self) -> bool:
        """While busy: whether memory waits to be used again, rather than only the end."""
        ...

    def on_error(self, error: BaseException) -> None:
        """One of the above, or a submitted function of this endpoint, raised ``error``."""
        ...
