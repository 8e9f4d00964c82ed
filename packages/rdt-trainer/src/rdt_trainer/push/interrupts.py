"""What ends a push from outside, as one kind of interrupt: servers must be let go on first."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["SignalInterrupt", "interrupted_by_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class SignalInterrupt(KeyboardInterrupt):
    """A signal came that would have ended the process at once.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number,), vars(self)


@contextmanager
def interrupted_by_signals() -> Generator[None]:
    """Raise `SignalInterrupt` at a SIGTERM or SIGHUP, unless the process ignores or handles it.

    Only the main thread can ask for that; elsewhere nothing is changed.
    """

    def interrupt(number: int, frame: object) -> None:
        raise SignalInterrupt(number)

    is_main = threading.current_thread() is threading.main_thread()
    ours = [each for each in _SIGNALS if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)
