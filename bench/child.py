"""Processes that end with the one that started them, however that ends."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import TypeVar

__all__ = ["follow_parent", "in_fork"]

CASE_SECONDS = 900.0

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1


def follow_parent(parent: int) -> None:
    """Have this process killed when the thread that forked it ends; Linux only.

    Args:
        parent: id of the process that forked it; if that is gone already, this one exits.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def in_fork(action: Callable[[], Result]) -> Result:
    """What ``action`` returns in a process forked for it, which dies with this one."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    parent = os.getpid()

    def child() -> None:
        follow_parent(parent)
        send.send(action())

    process = context.Process(target=child)
    process.start()
    send.close()
    try:
        if not receive.poll(CASE_SECONDS):
            raise TimeoutError(f"waited {CASE_SECONDS} s for {action}")
        result = receive.recv()  # an `EOFError` if it failed; it has said why
    except BaseException:
        process.kill()
        raise
    process.join(CASE_SECONDS)
    return result
