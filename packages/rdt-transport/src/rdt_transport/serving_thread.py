"""The producer's serving thread: packs at once, and what must wait for quiet between epochs."""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from rdt_transport.errors import RdtTransportError, SyncTimeoutError

__all__ = ["ServingThread"]

_logger = logging.getLogger(__name__)

Job = Callable[[], None]


class ServingThread:
    """Runs jobs one after another; `run_when_quiet` holds a job back while an epoch is open.

    Registering memory while reads fly fails on some fabrics, so consumers are admitted only in
    between. A job that raises is logged, and the thread goes on; ``on_error`` hears of it unless
    the job was one for quiet, which concerns no epoch.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._held: list[Job] = []
        self._quiet = True
        self._at_work = False  # on a job for quiet
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; jobs given before wait for it."""
        self._thread.start()

    def run(self, job: Job) -> None:
        """Run ``job`` as soon as the jobs before it are done (any thread)."""
        self._jobs.put(job)

    def run_when_quiet(self, job: Job) -> None:
        """Run ``job`` now, or when the open epoch has ended (any thread)."""
        with self._lock:
            if self._quiet:
                self._jobs.put(partial(self._run_quiet, job))
            else:
                self._held.append(job)

    def set_quiet(self, quiet: bool) -> None:
        """Say that an epoch ended (True) or opens (False); ending releases the held jobs.

        A job for quiet that runs already goes on: see `wait_for_quiet_job`.
        """
        with self._lock:
            self._quiet = quiet
            if quiet:
                held, self._held = self._held, []
                for job in held:
                    self._jobs.put(partial(self._run_quiet, job))

    def wait_for_quiet_job(self, timeout_seconds: float) -> None:
        """Wait until no job for quiet runs; `SyncTimeoutError` when one has not ended in time."""
        with self._lock:
            if not self._lock.wait_for(lambda: not self._at_work, timeout_seconds):
                raise SyncTimeoutError(
                    f"{self._thread.name}: a consumer is still being admitted or dismissed after "
                    f"{timeout_seconds:g} s; look at what the wire and the rendezvous logged"
                )

    def close(self, timeout_seconds: float) -> None:
        """Run what is queued, then end the thread; a failure to end is logged. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                _logger.warning(
                    "%s has not ended within %g s of its close: a pack may still read the sources, "
                    "or a consumer may still be admitted",
                    self._thread.name,
                    timeout_seconds,
                )

    def _run_quiet(self, job: Job) -> None:
        with self._lock:
            if not self._quiet:  # an epoch opened while the job was queued
                self._held.append(job)
                return
            self._at_work = True
        try:
            job()
        except Exception as error:
            self._log("a job between epochs", error)
        finally:
            with self._lock:
                self._at_work = False
                self._lock.notify_all()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._log("a job", error)
                self._on_error(error)

    def _log(self, what: str, error: Exception) -> None:
        """With the place of what is a mistake of ours; peers and the rendezvous may be gone."""
        trace = None if isinstance(error, RdtTransportError) else error
        _logger.error("%s: %s failed: %s", self._thread.name, what, error, exc_info=trace)
