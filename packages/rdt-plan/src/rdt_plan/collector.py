"""The garbage collector, paused: plans and records only add objects, and collections find none.

Beside an inference engine's heap, each of those takes as long as a good part of a plan.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Generator[None]:
    """Leaves it as it was found, also where several threads pause it at once."""
    if was_enabled := gc.isenabled():  # who finds it off leaves it to whoever turned it off
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
