"""Running functions in forked processes, a few at a time."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from census.reasons import crash_reason

__all__ = ["Forks", "Job"]

_FORK = get_context("fork")


@dataclass(slots=True, eq=False)
class Job:
    """One call in a process of its own.

    Attributes:
        call: what runs there; it returns something small that can be pickled.
        log: the file that takes what the process prints.
        done: called in this process with the result and, when there is none, with the reason.
    """

    call: Callable[[], Any]
    log: Path
    done: Callable[[Any, str], None]
    _process: Any = field(default=None, init=False)
    _reader: Connection | None = field(default=None, init=False)
    _deadline: float = field(default=0.0, init=False)


class Forks:
    """At most ``num_processes`` jobs at once, each killed after ``timeout_seconds``."""

    def __init__(self, num_processes: int, timeout_seconds: float) -> None:
        self._num_processes = num_processes
        self._timeout_seconds = timeout_seconds
        self._running: list[Job] = []

    def run(self, jobs: Iterator[Job], more: list[Job]) -> None:
        """Run all of ``jobs``; those that a job's ``done`` puts into ``more`` come first."""
        try:
            while True:
                while len(self._running) < self._num_processes:
                    job = more.pop(0) if more else next(jobs, None)
                    if job is None:
                        break
                    self._start(job)
                if not self._running:
                    return
                self._reap()
        finally:
            for job in self._running:
                job._process.kill()
                job._process.join()
            self._running.clear()

    def _start(self, job: Job) -> None:
        job._reader, writer = _FORK.Pipe(duplex=False)
        job._process = _FORK.Process(target=_child, args=(job.call, job.log, writer))
        sys.stdout.flush()
        sys.stderr.flush()
        job._process.start()
        writer.close()
        job._deadline = monotonic() + self._timeout_seconds
        self._running.append(job)

    def _reap(self) -> None:
        """Wait for a process to end, or for the first deadline."""
        remaining = min(job._deadline for job in self._running) - monotonic()
        wait([job._process.sentinel for job in self._running], max(remaining, 0))
        for job in list(self._running):
            late = job._deadline <= monotonic()
            if job._process.is_alive():
                if not late:
                    continue
                job._process.kill()
            job._process.join()
            self._running.remove(job)
            assert job._reader is not None
            with job._reader:
                try:
                    result, failure = job._reader.recv()
                except EOFError:
                    result, failure = None, _how_it_ended(job._process.exitcode, job.log)
                    if late:
                        failure = f"it took more than {self._timeout_seconds:.0f} s"
            job.done(result, failure)


def _child(call: Callable[[], Any], log: Path, writer: Connection) -> None:
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(number, 1)
    os.dup2(number, 2)
    try:
        writer.send((call(), ""))
    except BaseException as error:
        traceback.print_exc()
        writer.send((None, crash_reason(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what vLLM would do at exit, it does for groups that are fake


def _how_it_ended(exit_code: int | None, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    how = f"signal {-exit_code}" if exit_code and exit_code < 0 else f"exit status {exit_code}"
    return f"its process ended with {how}" + (f": {lines[-1][:200]}" if lines else "")
