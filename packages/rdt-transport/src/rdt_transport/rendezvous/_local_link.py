"""The connection of a client that lives where the rendezvous does: calls without a socket.

A question wakes the service's thread and the caller's, and nobody else. The service alone changes
the job's state: a caller's thread may be interrupted at any step.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from rdt_transport.errors import RendezvousLostError, RendezvousTimeoutError
from rdt_transport.rendezvous._link import GRACE_SECONDS, Link, Listen
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.rendezvous.events import ConnectionLost
from rdt_transport.rendezvous.messages import decode_request, encode_message
from rdt_transport.rendezvous.requests import Request

__all__ = ["LocalLink", "Service"]


class Service(Protocol):
    """What a client of this process asks of the service; all of it on the service's thread."""

    def join(self, deliver: Callable[[Effect], None]) -> int:
        """A client without a lease, as it cannot be lost alone; its number.

        ``deliver`` is called with what is for it. Raises `RendezvousLostError` when the job is
        over.
        """
        ...

    def ask(self, client: int, call: int, request: Request, timeout_seconds: float) -> None:
        """A request, whose answer is delivered then or later; nothing of one that is gone."""
        ...

    def part(self, client: int, reason: str) -> None:
        """That client is gone: what it still holds is lost. Nothing happens the second time."""
        ...


class LocalLink(Link):
    """Raises `RendezvousLostError` when the job is over.

    Args:
        address: of the rendezvous.
        on_event: see `RendezvousClient`.
        service: whom to ask.
        submit: runs a function on the service's thread; raises `RuntimeError` when that has ended.
        lease_seconds: how long the service may be slow for.
    """

    def __init__(
        self,
        address: RendezvousAddress,
        on_event: Listen | None,
        service: Service,
        submit: Callable[[Callable[[], None]], Any],
        lease_seconds: float,
    ) -> None:
        super().__init__(address, on_event)
        self._lease_seconds = lease_seconds
        self._service = service
        self._submit = submit
        self._client = -1
        joined: Future[None] = Future()

        def join() -> None:
            try:
                self._client = service.join(self._receive)
            except RendezvousLostError as error:
                joined.set_exception(error)
            else:
                joined.set_result(None)

        if not self._run(join):
            raise RendezvousLostError(f"the rendezvous at {address} is closed")
        try:
            joined.result(lease_seconds + GRACE_SECONDS)
        except TimeoutError as error:
            raise RendezvousTimeoutError(
                f"the rendezvous at {address}, in this process, did not answer within "
                f"{lease_seconds + GRACE_SECONDS:g} s; is this machine overloaded?"
            ) from error
        self._event_thread.start()

    def _send(self, number: int, request: Request, timeout_seconds: float) -> None:
        # Spelled and read as over TCP, so that it is refused for what would be refused there.
        asked = decode_request(json.loads(json.dumps(encode_message(request))))
        ask = lambda: self._service.ask(self._client, number, asked, timeout_seconds)  # noqa: E731
        if not self._run(ask):
            self._lost("it is closed")

    def _shut(self) -> None:
        self._run(lambda: self._service.part(self._client, "its connection closed"))
        self._events.put(None)

    def _run(self, call: Callable[[], None]) -> bool:
        """Have the service's thread do it; False when that has ended."""
        try:
            self._submit(call)
        except RuntimeError:
            return False
        return True

    # ---- the service's thread ----------------------------------------------------------------

    def _receive(self, effect: Effect) -> None:
        match effect:
            case Answer(_, number, _, value):
                if (call := self._answer(number)) is not None:
                    call.set_result(value)
            case Refusal(_, number, error):
                if (call := self._answer(number)) is not None:
                    call.set_exception(error)
            case Push(_, event):
                self._tell(event)
            case Disconnect(_, reason):
                self._lost(reason)

    def _lost(self, reason: str) -> None:
        told = f"the connection to the rendezvous at {self._address} is lost: {reason}"
        with self._lock:
            if self._ended is not None:
                return
            self._events.put(ConnectionLost(told))
        self._end(RendezvousLostError(told))
