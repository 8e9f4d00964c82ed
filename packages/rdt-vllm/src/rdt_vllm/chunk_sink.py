"""What the installer tells whoever receives chunks."""

from typing import Protocol

from rdt_transport.events import Event

__all__ = ["ChunkSink"]


class ChunkSink(Protocol):
    """Whom the installer answers; `rdt_transport.consumer.Consumer` is one. Any thread."""

    def scattered(self, index: int, event: Event) -> None:
        """Chunk ``index``'s slot is read by work that ``event`` follows."""
        ...

    def scatter_failed(self, index: int, error: BaseException) -> None:
        """Chunk ``index`` could not be, or will not be, installed."""
        ...

    def fail(self, error: BaseException) -> None:
        """The whole sync cannot succeed."""
        ...
