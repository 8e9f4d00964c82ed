"""One job's state, changed by the event loop and by clients that live in its process.

Whoever changes it hands what follows to the clients of this process at once; what is for the others
waits in the outbox for the event loop, which alone writes to sockets.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from rdt_transport.errors import RendezvousLostError
from rdt_transport.rendezvous.effects import Disconnect, Effect
from rdt_transport.rendezvous.requests import Request
from rdt_transport.rendezvous.state import JobState

__all__ = ["SharedState"]

Change = Callable[[float], list[Effect]]


class SharedState:
    """Thread-safe. Its clock is that of the event loops: `time.monotonic`.

    Args:
        state: nobody else's.

    Attributes:
        outbox: effects for the clients that have connections, in order.
        wake: called on other threads than the event loop's, when that has something to do.
    """

    def __init__(self, state: JobState) -> None:
        self.outbox: deque[Effect] = deque()
        self.wake: Callable[[], object] = lambda: None
        self._state = state
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._deliver: dict[int, Callable[[Effect], None]] = {}  # to the clients of this process
        self._closed = False

    # ---- clients of this process, any thread -------------------------------------------------

    def join(self, deliver: Callable[[Effect], None]) -> int:
        """A client without a lease, as it cannot be lost alone; its number.

        ``deliver`` is called with what is for it, on any thread, and must not ask. Raises
        `RendezvousLostError` when the job is over, as `ask` does.
        """
        with self._lock:
            if self._closed:
                raise _is_closed()
            client = next(self._numbers)
            self._deliver[client] = deliver
            self._state.connected(client, time.monotonic(), is_leased=False)
        return client

    def ask(self, client: int, call: int, request: Request, timeout_seconds: float) -> None:
        """A request, whose answer may be delivered before this returns."""
        if client not in self._deliver:
            raise _is_closed()
        if not self.request(client, call, request, timeout_seconds) or self.outbox:
            self.wake()

    def part(self, client: int, reason: str) -> None:
        """Such a client is gone; nothing happens the second time, or when the job is over."""
        if self._deliver.pop(client, None) is not None:
            self.lost(client, reason)
            self.wake()

    # ---- the event loop ----------------------------------------------------------------------

    def connected(self) -> int:
        """A client has proved the token: its number."""
        with self._lock:
            client = next(self._numbers)
            self._state.connected(client, time.monotonic())
        return client

    def heard(self, client: int) -> None:
        """See `JobState.heard`."""
        with self._lock:
            self._state.heard(client, time.monotonic())

    def request(self, client: int, call: int, request: Request, timeout_seconds: float) -> bool:
        """Whether anything follows at once; see `JobState.request`."""
        return self._change(
            lambda now: self._state.request(client, call, request, timeout_seconds, now)
        )

    def lost(self, client: int, reason: str) -> None:
        """See `JobState.lost`."""
        self._change(lambda now: self._state.lost(client, reason, now))

    def tick(self, stalled_seconds: float) -> None:
        """See `JobState.tick`, and `JobState.stalled`."""

        def tick(now: float) -> list[Effect]:
            self._state.stalled(stalled_seconds)
            return self._state.tick(now)

        self._change(tick)

    def next_deadline(self) -> float:
        """See `JobState.next_deadline`."""
        with self._lock:
            return self._state.next_deadline()

    def close(self) -> None:
        """The job is over: that everybody is cut off now is no news of anybody's death."""
        with self._lock:
            self._closed = True
            self.outbox.clear()
            parties, self._deliver = self._deliver, {}
        for client, deliver in parties.items():
            deliver(Disconnect(client, "it is closed"))

    def _change(self, change: Change) -> bool:
        with self._lock:
            effects = [] if self._closed else change(time.monotonic())
            for effect in effects:
                if (deliver := self._deliver.get(effect.client)) is not None:
                    deliver(effect)
                else:
                    self.outbox.append(effect)
        return bool(effects)


def _is_closed() -> RendezvousLostError:
    return RendezvousLostError("the rendezvous of this process is closed")
