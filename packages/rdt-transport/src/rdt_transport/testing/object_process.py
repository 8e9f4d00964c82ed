"""An object in a process of its own, driven from here: for what only two processes can show."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from rdt_transport.errors import WireTimeoutError

__all__ = ["ObjectProcess"]

_Make = Callable[..., AbstractContextManager[object]]


def _serve(connection: Connection, make: _Make, arguments: tuple[object, ...]) -> None:
    with make(*arguments) as held:
        while (request := connection.recv()) is not None:
            method, arguments = request
            try:
                connection.send((True, getattr(held, method)(*arguments)))
            except Exception as error:
                connection.send((False, error))


class ObjectProcess:
    """A spawned process that holds one object and does what it is asked; ended with ``with``.

    Args:
        make: importable; what it yields, called with ``arguments`` in the process, is the object.
    """

    TIMEOUT_SECONDS = 120.0

    def __init__(self, make: _Make, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "ObjectProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def ask(self, method: str, *arguments: object) -> Any:
        """What a method of the object returns. Its exceptions are raised here; `WireTimeoutError`
        when no answer comes."""
        self.tell(method, *arguments)
        return self.answer()

    def tell(self, method: str, *arguments: object) -> None:
        """Have a method run; `answer` returns what it returned, once for each."""
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """What the method told first returned."""
        if not self._connection.poll(self.TIMEOUT_SECONDS):
            raise WireTimeoutError(f"no answer of the process within {self.TIMEOUT_SECONDS} s")
        done, answer = self._connection.recv()
        if not done:
            raise answer
        return answer

    def stop(self) -> int | None:
        """Let go of the object and wait for its exit; the exit code."""
        self._connection.send(None)
        self._process.join(self.TIMEOUT_SECONDS)
        return self._process.exitcode

    def freeze(self) -> None:
        """Stop it from running: from now on it polls nothing, and its connections stay open."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # the signal takes a while

    def kill(self) -> None:
        """End it at once, as a crash does. Idempotent."""
        self._process.kill()
        self._process.join(self.TIMEOUT_SECONDS)
        self._connection.close()
