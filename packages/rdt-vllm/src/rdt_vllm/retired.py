"""Memory that one thread's stream allocated and another's may still read."""

from collections import deque

import torch

from rdt_transport.events import Event
from rdt_vllm.module_tensors import used_here

__all__ = ["Retired"]


class Retired:
    """Tensors that nobody needs any more once an event has completed.

    A device's allocator gives what is let go of to whatever the stream that it was allocated on
    enqueues next, without regard to other streams. It can be told of those, tensor by tensor, which
    takes microseconds each; so they are kept until it need not be told.

    Lists of them are emptied then: the frames of an error that is kept may hold them for long.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Event, list[torch.Tensor]]] = deque()

    def add(self, tensors: list[torch.Tensor], event: Event) -> None:
        """Take ``tensors``, which nothing behind ``event`` reads; any thread, events in order."""
        self._waiting.append((event, tensors))

    def let_go(self) -> None:
        """Let go of what no device reads any more; one thread at a time."""
        while self._waiting and self._waiting[0][0].query():
            self._waiting.popleft()[1].clear()

    def end(self) -> None:
        """Let go of everything: the calling thread's current stream waits for all the events."""
        while self._waiting:
            event, tensors = self._waiting.popleft()
            if not event.query():
                used_here(tensors)
            tensors.clear()
