"""A process of the doctor, asked from outside; it never outlives the ``with`` that made it."""

import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from rdt_transport.doctor._probe import serve_probe
from rdt_transport.errors import WireError, WireTimeoutError

__all__ = ["ProbeProcess"]

_END_SECONDS = 5.0
_STARTING = "starting"


class ProbeProcess:
    """A spawned process with one agent and one arena of ``device``; starts at once, made or not.

    Args:
        device: ``cpu`` or ``cuda:0``.
        folder: where UCX writes what it chose.
        is_loopback: whether UCX may use no other network, unless the user said which.
        timeout_seconds: of every answer.

    Attributes:
        device: the same.
    """

    def __init__(
        self, device: str, folder: Path, *, is_loopback: bool, timeout_seconds: float
    ) -> None:
        self.device = device
        self._timeout_seconds = timeout_seconds
        self._awaits_start = True
        self._lost: str | None = None
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, device, str(folder), is_loopback)
        self._process = context.Process(target=serve_probe, args=arguments, daemon=True)
        with ThreadPoolExecutor(1) as starter:  # a thread that Ctrl-C does not interrupt
            starter.submit(_start, self._process).result()
        theirs.close()

    def __enter__(self) -> "ProbeProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._connection.send(None)
        except OSError:
            pass
        self._process.join(0.0 if self._lost else _END_SECONDS)
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._connection.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def ask(self, method: str, *arguments: object) -> Any:
        """What ``method`` of its `Probe` returns; ``attend`` takes whether others read it now.

        Raises:
            WireError: it failed, the process died, or the agent could not be made.
            WireTimeoutError: no answer in time; it is not asked again.
        """
        if self._awaits_start:
            self._awaits_start = False
            self._answer(_STARTING)
        if self._lost is None:
            try:
                self._connection.send((method, arguments))
            except OSError as error:
                self._lose(f"{self.device}: its process has ended: {error}")
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        if self._lost is not None:
            raise WireError(self._lost)
        if not self._connection.poll(self._timeout_seconds + _END_SECONDS):
            message = f"{self.device}: {what} took more than {self._timeout_seconds:g} s"
            self._lost = message
            raise WireTimeoutError(f"{message}; raise --timeout if the machine is only slow")
        try:
            done, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            self._lose(
                f"{self.device}: its process died while {what}, exit {self._process.exitcode}",
                error,
            )
        if not done:
            message = f"{self.device}: {what}: {answer}"
            if what == _STARTING:
                self._lost = message
            raise WireError(message)
        return answer

    def _lose(self, message: str, cause: BaseException | None = None) -> NoReturn:
        self._lost = message
        raise WireError(message) from cause


def _start(process: BaseProcess) -> None:
    """Ctrl-C goes to every process of a terminal; whoever asks this one ends it."""
    resource_tracker.ensure_running()  # whose start lets SIGINT through again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
    process.start()
