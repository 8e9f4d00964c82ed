"""The rendezvous in a thread of this process: for one trainer, or for a pushing process."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from rdt_transport.errors import RendezvousError, RendezvousTimeoutError
from rdt_transport.rendezvous._local_link import LocalLink
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.client import RendezvousClient
from rdt_transport.rendezvous.events import RendezvousEvent
from rdt_transport.rendezvous.server import RendezvousServer
from rdt_transport.rendezvous.settings import JobSettings

__all__ = ["LocalHost", "RendezvousHost", "host_local"]

_logger = logging.getLogger(__name__)

_START_TIMEOUT_SECONDS = 30.0
_STOP_TIMEOUT_SECONDS = 30.0  # closing every connection takes about a second


class RendezvousHost(Protocol):
    """Something that keeps a rendezvous running until it is closed."""

    @property
    def address(self) -> RendezvousAddress:
        """Where clients reach it."""
        ...

    def close(self) -> None:
        """End the job: every client sees its connection closed. Idempotent."""
        ...


class LocalHost:
    """A server on an event loop of its own, in a daemon thread. Any thread may close it."""

    def __init__(
        self, job: str, token: str, settings: JobSettings, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        RendezvousAddress(host, port or 1, job, token)  # refuses before anything is started
        server = RendezvousServer(job, token, settings)
        self._settings = settings
        self._server = server
        started: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(server, host, port, started),
            name=f"rdt-rendezvous-{job}",
            daemon=True,
        )
        self._thread.start()
        try:
            port = started.result(_START_TIMEOUT_SECONDS)
        except OSError as error:  # a TimeoutError is one
            if not started.done():
                self._stop_soon()
                raise RendezvousTimeoutError(
                    f"the rendezvous does not listen on {host}:{port} after "
                    f"{_START_TIMEOUT_SECONDS:g} s; give an address instead of a name that is slow "
                    "to resolve"
                ) from error
            self._thread.join(_STOP_TIMEOUT_SECONDS)
            raise RendezvousError(
                f"the rendezvous cannot listen on {host}:{port}: {error}; give a host of this "
                "machine that the workers can reach"
            ) from error
        self.address = RendezvousAddress(host, port, job, token)

    def _run(self, server: RendezvousServer, host: str, port: int, started: Future[int]) -> None:
        async def serve() -> None:
            try:
                started.set_result(await server.start(host, port))
            except BaseException as error:
                started.set_exception(error)
                return
            await self._stop.wait()
            await server.close()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(serve())

    def connect(
        self, on_event: Callable[[RendezvousEvent], None] | None = None
    ) -> RendezvousClient:
        """A client of this process: no socket, and no lease, as it ends with the rendezvous.

        See `RendezvousClient`; raises `RendezvousLostError` when this is closed.
        """
        lease_seconds = self._settings.lease_seconds
        return RendezvousClient(
            self.address,
            on_event=on_event,
            connect=lambda listen: LocalLink(
                self.address, listen, self._server, self._loop.call_soon_threadsafe, lease_seconds
            ),
        )

    def close(self) -> None:
        """End the job: every client sees its connection closed. Idempotent.

        A server that does not end within its deadline is logged and left to its daemon thread.
        """
        if self._thread.is_alive():
            self._stop_soon()
            self._thread.join(_STOP_TIMEOUT_SECONDS)
            if self._thread.is_alive():
                _logger.warning(
                    "the rendezvous at %s has not ended within %g s of its close: it may still "
                    "hold its port and connections until this process ends",
                    self.address,
                    _STOP_TIMEOUT_SECONDS,
                )

    def _stop_soon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop.set)
        except RuntimeError:
            pass  # it has just ended


def host_local(
    job: str, token: str, settings: JobSettings, host: str = "127.0.0.1", port: int = 0
) -> LocalHost:
    """Serve the job's rendezvous from this process.

    Args:
        job: the job's name.
        token: the job's secret; make it with ``secrets.token_hex``.
        settings: what the whole job agrees on.
        host: address to listen on and to give to the workers; loopback by default, so workers on
            other nodes need this node's address.
        port: 0 picks a free one.

    Raises `RendezvousError` when the address cannot be bound.
    """
    return LocalHost(job, token, settings, host, port)
