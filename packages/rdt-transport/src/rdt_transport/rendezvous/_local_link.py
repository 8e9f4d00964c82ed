"""The connection of a client that lives where the rendezvous does: calls without a socket.

A question that can be answered at once costs no thread a wake-up: a sync asks three.
"""

from rdt_transport.errors import RendezvousLostError
from rdt_transport.rendezvous._link import Link, Listen
from rdt_transport.rendezvous._shared_state import SharedState
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.rendezvous.events import ConnectionLost
from rdt_transport.rendezvous.requests import Request

__all__ = ["LocalLink"]


class LocalLink(Link):
    """Raises `RendezvousLostError` when the job is over."""

    def __init__(
        self,
        address: RendezvousAddress,
        on_event: Listen | None,
        state: SharedState,
        lease_seconds: float,
    ) -> None:
        super().__init__(address, on_event)
        self._lease_seconds = lease_seconds
        self._state = state
        self._client = state.join(self._receive)
        self._event_thread.start()

    def _send(self, number: int, request: Request, timeout_seconds: float) -> None:
        self._state.ask(self._client, number, request, timeout_seconds)

    def _shut(self) -> None:
        self._state.part(self._client, "its connection closed")
        self._events.put(None)

    def _receive(self, effect: Effect) -> None:
        """On any thread, under the state's lock."""
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
                why = f"the connection to the rendezvous at {self._address} is lost: {reason}"
                self._lost(why)

    def _lost(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._events.put(ConnectionLost(reason))
        self._end(RendezvousLostError(reason))
