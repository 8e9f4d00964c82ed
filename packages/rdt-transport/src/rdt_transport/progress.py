"""The progress thread: the one thread that owns a wire, from its creation to its close."""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from rdt_plan.doorbell import Doorbell
from rdt_plan.errors import RdtPlanError
from rdt_transport.endpoint import Endpoint
from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.events import events_of
from rdt_transport.pauses import Pauses, sharpen_pauses
from rdt_transport.peers import Peers
from rdt_transport.wire.base import Notification, ReadHandle, Wire

__all__ = ["Endpoint", "ProgressThread"]

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

START_TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 0.5


class ProgressThread:
    """Owns a wire: makes it, polls it, runs what it is given on it, closes it.

    While an endpoint is busy the wire is polled with pauses of 20 to 200 microseconds, of 20 where
    it is urgent, moves memory of a GPU, and something happened just now; when none is, every
    ``idle_poll_seconds``, and more often for a second after anything happened. Whatever is
    submitted wakes the thread. Methods may be called from any thread unless they say otherwise.

    Args:
        make_wire: makes the wire; called on the thread.
        name: of the thread, and in messages.
        idle_poll_seconds: pause between polls while nothing happens.
        device: whose memory the wire moves; the thread is bound to it before it makes the wire.

    Attributes:
        wire_name: the wire's name.
        peers: whom its sessions have met; only for functions that run on the thread.
        dropped: notifications and reads that had no endpoint or were no doorbells.

    Raises:
        Exception: what ``make_wire`` raised.
        WireTimeoutError: it did not return within `START_TIMEOUT_SECONDS`.
        WireError: no memory of that device can be moved here.
    """

    def __init__(
        self,
        make_wire: Callable[[], Wire],
        *,
        name: str,
        idle_poll_seconds: float = 0.05,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.dropped = 0
        self.peers = Peers()
        self._make_wire = make_wire
        self._events = events_of(device)  # here: "cuda" is the device of the caller's thread
        self._eager = torch.device(device).type != "cpu"
        self._pauses = Pauses(idle_poll_seconds, eager=self._eager)
        self._endpoints: Mapping[bytes, Endpoint] = {}
        self._owners: WeakKeyDictionary[ReadHandle, Endpoint] = WeakKeyDictionary()
        self._jobs: queue.SimpleQueue[Callable[[Wire], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._poll_error: str | None = None
        started: Future[str] = Future()
        # A daemon that is closed at exit: a forgotten close neither hangs nor aborts the process.
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)
        if not wait([started], START_TIMEOUT_SECONDS).done or started.exception():
            self._stop()
        if not started.done():
            raise WireTimeoutError(
                f"{name}: the wire was not made within {START_TIMEOUT_SECONDS:g} s; look at what "
                "NIXL and UCX logged"
            )
        self.wire_name = started.result()

    def call(self, fn: Callable[[Wire], _Result], timeout_seconds: float) -> _Result:
        """The result of ``fn(wire)``, run on the thread; what it raises is raised here.

        Raises:
            WireTimeoutError: it did not end in time; if it has not begun, it never will.
            WireError: this thread is closed.
        """
        if threading.current_thread() is self._thread:
            raise WireError(f"{self.name}: a call from the progress thread would wait for itself")
        future: Future[_Result] = Future()

        def run(wire: Wire) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(wire))
                except BaseException as error:
                    future.set_exception(error)

        self._put(run)
        wait([future], timeout_seconds)
        if future.cancel():
            raise WireTimeoutError(
                f"{self.name}: a call has not begun within {timeout_seconds:g} s; "
                "something holds the progress thread up"
            )
        # It has begun. If it waits until the same deadline, its own error says more than ours.
        if not wait([future], _GRACE_SECONDS).done:
            raise WireTimeoutError(
                f"{self.name}: a call has not ended within {timeout_seconds:g} s; raise "
                "timeout_seconds if the peer is only slow; otherwise look at its log"
            )
        return future.result()

    def submit(self, fn: Callable[[Wire], None], endpoint: Endpoint | None = None) -> None:
        """Run ``fn(wire)`` on the thread, after everything given before; returns at once.

        What it raises goes to ``endpoint.on_error``, or to the log. Raises `WireError` when closed.
        """

        def run(wire: Wire) -> None:
            try:
                fn(wire)
            except Exception as error:
                self._report(endpoint, error)

        self._put(run)

    def attach(self, endpoint: Endpoint) -> None:
        """Deliver to ``endpoint`` from now on."""
        with self._lock:
            if endpoint.incarnation in self._endpoints:
                raise WireError(
                    f"{self.name}: incarnation {endpoint.incarnation.hex()} is attached"
                )
            self._endpoints = {**self._endpoints, endpoint.incarnation: endpoint}
        self.submit(lambda wire: None)  # it may be busy: wake up

    def detach(self, endpoint: Endpoint) -> None:
        """Deliver nothing more to ``endpoint``, but for a callback that is running. Idempotent."""
        with self._lock:
            self._endpoints = {
                key: known for key, known in self._endpoints.items() if known is not endpoint
            }

    def own(self, handle: ReadHandle, endpoint: Endpoint) -> None:
        """Deliver the reads of ``handle`` to ``endpoint``; only on the progress thread."""
        self._owners[handle] = endpoint

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Run what was given, close the wire, end the thread. Idempotent.

        Raises:
            WireTimeoutError: the thread has not ended in time.
        """
        self._stop()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise WireTimeoutError(
                f"{self.name}: has not ended within {timeout_seconds:g} s of its close; its wire "
                "may still hold memory and peers until this process ends"
            )

    def _stop(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        with contextlib.suppress(WireTimeoutError):
            self.close()

    def _put(self, job: Callable[[Wire], None]) -> None:
        with self._lock:  # so that nothing can follow the end mark
            if self._closed:
                raise WireError(f"{self.name} is closed")
            self._jobs.put(job)

    # ---- the thread ------------------------------------------------------------------------

    def _run(self, started: "Future[str]") -> None:
        try:
            if self._eager:
                sharpen_pauses()
            self._events.bind()
            wire = self._make_wire()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(wire.name)
        del started
        try:
            self._loop(wire)
        finally:
            wire.close()

    def _loop(self, wire: Wire) -> None:
        while True:
            num_jobs = self._run_jobs(wire)
            if num_jobs is None:
                return
            num_events = self._poll(wire)
            busy = urgent = False
            for endpoint in self._endpoints.values():
                self._guard(endpoint, endpoint.on_poll, wire)
                if self._guard(endpoint, endpoint.is_busy):
                    busy, urgent = True, self._guard(endpoint, endpoint.is_urgent) or urgent
            happened = num_jobs > 0 or num_events > 0
            self._pauses.polled(time.monotonic(), happened=happened, busy=busy, urgent=urgent)

    def _run_jobs(self, wire: Wire) -> int | None:
        """Wait for the first job as long as the pause, run all there are; None at the end mark."""
        count = 0
        try:
            job = self._jobs.get(timeout=self._pauses.seconds)
            while job is not None:
                job(wire)
                count += 1
                job = self._jobs.get_nowait()
            return None
        except queue.Empty:
            return count

    def _poll(self, wire: Wire) -> int:
        try:
            events = wire.poll()
        except Exception as error:
            if str(error) != self._poll_error:  # once, not every loop
                self._poll_error = str(error)
                for endpoint in self._endpoints.values():
                    self._report(endpoint, error)
            return 0
        self._poll_error = None
        for event in events:
            if isinstance(event, Notification):
                self._deliver(wire, event)
            else:
                owner = self._owners.get(event.handle)
                if owner is None or owner.incarnation not in self._endpoints:
                    self._drop(f"a read from {event.handle.peer_name} that nobody owns")
                else:
                    self._guard(owner, owner.on_read, wire, event)
        return len(events)

    def _deliver(self, wire: Wire, event: Notification) -> None:
        try:
            doorbell = Doorbell.decode(event.message)
        except RdtPlanError as error:
            self._drop(f"a notification from {event.sender}: {error}")
            return
        endpoint = self._endpoints.get(doorbell.receiver)
        if endpoint is None:
            self._drop(f"a doorbell from {event.sender} for {doorbell.receiver.hex()}")
        else:
            self._guard(endpoint, endpoint.on_doorbell, wire, event.sender, doorbell)

    def _drop(self, what: str) -> None:
        self.dropped += 1
        _logger.debug("%s: dropped %s", self.name, what)

    def _guard(
        self, endpoint: Endpoint, callback: Callable[..., _Result], *args: Any
    ) -> _Result | None:
        """An endpoint's mistake is its own: the thread and the other endpoints go on."""
        try:
            return callback(*args)
        except Exception as error:
            self._report(endpoint, error)
            return None

    def _report(self, endpoint: Endpoint | None, error: Exception) -> None:
        if endpoint is None:
            _logger.error("%s: a submitted function failed: %s", self.name, error, exc_info=error)
            return
        try:
            endpoint.on_error(error)
        except Exception:
            _logger.exception("%s: on_error of %s failed", self.name, endpoint.incarnation.hex())
