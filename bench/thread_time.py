"""Where the time of a process goes, thread by thread."""

import threading
import time

__all__ = ["OTHER_THREADS", "cpu_seconds"]

OTHER_THREADS = "not Python's"
"""Threads that Python did not start: torch's, NIXL's, and Python threads that have ended."""


def cpu_seconds() -> dict[str, float]:
    """CPU seconds of this process so far, user and system, by thread name."""
    spent: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            spent[thread.name] = spent.get(thread.name, 0.0) + time.clock_gettime(clock)
    spent[OTHER_THREADS] = max(0.0, time.process_time() - sum(spent.values()))
    return spent
