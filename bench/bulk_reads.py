"""One large read at a time over a progress thread: what a whole sync is compared with."""

import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager

import torch

from rdt_plan import Doorbell
from rdt_transport import ProgressThread
from rdt_transport.errors import WireError
from rdt_transport.memory import Arena
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["SECONDS", "BulkReads", "bulk_buffer"]

SECONDS = 60.0  # of every wait


def bulk_buffer(num_bytes: int, plain_pages: bool) -> torch.Tensor:
    """Touched bytes to read from or into: an ordinary tensor, or what rings are made of."""
    if plain_pages:
        return torch.empty(num_bytes, dtype=torch.uint8).zero_()
    return Arena(1, num_bytes).buffer


class BulkReads:
    """An endpoint that keeps its wire polled eagerly while a baseline runs, and waits for reads."""

    def __init__(self, progress: ProgressThread) -> None:
        self.incarnation = uuid.uuid4().bytes
        self._ended = threading.Event()
        self._failure = ""
        self._progress = progress
        self._busy = False
        progress.attach(self)

    @contextmanager
    def busy(self) -> Generator[None]:
        """While it lasts the wire is polled as in an open epoch."""
        self._busy = True
        self._progress.submit(lambda wire: None)
        try:
            yield
        finally:
            self._busy = False

    def wait(self) -> None:
        """Block until the posted read has ended; raises `WireError` unless well."""
        if not self._ended.wait(SECONDS) or self._failure:
            raise WireError(f"the baseline's read: {self._failure or 'no end'}")
        self._ended.clear()

    def on_doorbell(self, wire: Wire, sender: str, doorbell: Doorbell) -> None:
        """None is sent here."""

    def on_read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        self._failure = event.reason if isinstance(event, ReadFailed) else ""
        self._ended.set()

    def on_poll(self, wire: Wire) -> None:
        """Nothing to do."""

    def is_busy(self) -> bool:
        return self._busy

    def is_urgent(self) -> bool:
        return True

    def on_error(self, error: BaseException) -> None:
        raise error
