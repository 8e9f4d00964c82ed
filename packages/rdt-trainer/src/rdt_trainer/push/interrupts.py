"""What ends a push from outside, as one kind of interrupt: servers must be let go on first."""

import json
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["ENDED", "SignalInterrupt", "ended_by_signals", "interrupted_by_signals"]

ENDED = {
    128 + signal.SIGHUP: "hung up",
    128 + signal.SIGINT: "interrupted",
    128 + signal.SIGTERM: "terminated",
}
"""By exit status, what happened."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNHANDLED = (signal.SIG_DFL, signal.default_int_handler)


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
    """Raise `SignalInterrupt` at a SIGINT, SIGTERM or SIGHUP, and say at once what happens now.

    What the process ignores or handles itself stays so. Only the main thread can ask for that;
    elsewhere nothing is changed.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        ended = ENDED[128 + number]
        _say(2, f"\nrdt-push: {ended}: letting the servers go, which may take half a minute\n")
        raise SignalInterrupt(number)

    with _handled(interrupt):
        yield


@contextmanager
def ended_by_signals(as_json: bool) -> Generator[None]:
    """End the process at such a signal, in words; nothing has begun that could be undone.

    Nothing is raised, as modules that are being imported may swallow it or crash.
    """

    def end(number: int, frame: object) -> NoReturn:
        status = 128 + number
        told = f"{ENDED[status]}; nothing was changed"
        _say(2, f"rdt-push: {told}\n")
        if as_json:
            _say(1, json.dumps({"error": told, "exit_status": status}) + "\n")
        os._exit(status)

    with _handled(end):
        yield


@contextmanager
def _handled(handler: Callable[[int, object], NoReturn]) -> Generator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in _SIGNALS if is_main}
    ours = [each for each, found in before.items() if found in _UNHANDLED]
    for each in ours:
        signal.signal(each, handler)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, before[each])


def _say(descriptor: int, text: str) -> None:
    """Past buffers, which a handler may find in use; nobody may be there to read it."""
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return
