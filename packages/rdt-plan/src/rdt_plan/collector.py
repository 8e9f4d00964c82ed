"""The garbage collector, paused: plans and records only add objects, and collections find none.

Beside an inference engine's heap, each of those takes as long as a good part of a plan.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused(*, stays: bool = False) -> Generator[None]:
    """Leaves it as it was found, also where several threads pause it at once.

    Args:
        stays: what is made meanwhile is kept for long. It then goes to the oldest generation at the
            end, with all that is young, unless the process has frozen objects, which that would
            thaw. Otherwise a collection goes through it twice on its way there.
    """
    if was_enabled := gc.isenabled():  # who finds it off leaves it to whoever turned it off
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if stays and not gc.get_freeze_count():
                gc.freeze()  # neither looks at an object
                gc.unfreeze()
            gc.enable()
