"""How long the progress thread pauses between two polls of its wire."""

import contextlib
import ctypes

__all__ = ["Pauses", "sharpen_pauses"]

_SHORTEST_SECONDS = 20e-6
_BUSY_SECONDS = 200e-6  # some 10 % of a core: nobody starves on two of them
_EAGER_SECONDS = 5e-3
"""How long after something happened an eager busy wire is polled with the shortest pauses: reading
a large chunk takes less. Never without a pause, which would keep Python's other threads waiting;
they run at half speed even so, as a poll takes as long, so it is for what is urgent."""
_LIVELY_PAUSE_SECONDS = 1e-3
_LIVELY_SECONDS = 1.0
"""How long a quiet wire is polled faster after something happened: a peer's first contact needs a
few of our polls, none of which can be told from a poll that found nothing."""

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NANOSECONDS = 1000


class Pauses:
    """The pause grows while nothing happens, up to a bound that says how urgent the wire is.

    Args:
        idle_seconds: the longest pause of all.
        eager: whether the wire moves memory of a GPU, beside which there are cores to spare; a CPU
            that moves the bytes itself has none.

    Attributes:
        seconds: the pause before the next poll.
    """

    def __init__(self, idle_seconds: float, *, eager: bool) -> None:
        self.seconds = _SHORTEST_SECONDS
        self._idle_seconds = idle_seconds
        self._eager_seconds = _EAGER_SECONDS if eager else 0.0
        self._last_activity: float | None = None

    def polled(self, now: float, *, happened: bool, busy: bool, urgent: bool) -> None:
        """A poll at ``now``, in seconds of any steady clock, has found something or nothing.

        ``urgent``: see `Endpoint.is_urgent`.
        """
        if happened or self._last_activity is None:
            self._last_activity = now
        if happened:
            self.seconds = _SHORTEST_SECONDS
            return
        quiet_seconds = now - self._last_activity
        if busy:
            is_eager = urgent and quiet_seconds < self._eager_seconds
            longest = _SHORTEST_SECONDS if is_eager else _BUSY_SECONDS
        elif quiet_seconds < _LIVELY_SECONDS:
            longest = min(_LIVELY_PAUSE_SECONDS, self._idle_seconds)
        else:
            longest = self._idle_seconds
        self.seconds = min(2 * self.seconds, longest)


def sharpen_pauses() -> None:
    """Have the kernel end the calling thread's pauses on time, not some 50 microseconds late."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NANOSECONDS))
