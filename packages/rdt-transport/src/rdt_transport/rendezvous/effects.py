"""What the state machine wants done: the driver carries these out, in order."""

from dataclasses import dataclass
from typing import Any

from rdt_transport.errors import RdtTransportError
from rdt_transport.rendezvous.events import PushedEvent
from rdt_transport.rendezvous.requests import Request

__all__ = ["Answer", "Disconnect", "Effect", "Push", "Refusal"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A call's answer, of the type its request names."""

    client: int
    call: int
    request: Request
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call ends with an error."""

    client: int
    call: int
    error: RdtTransportError


@dataclass(frozen=True, slots=True)
class Push:
    """An event for one client."""

    client: int
    event: PushedEvent


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client's lease has ended: close its connection."""

    client: int
    reason: str


Effect = Answer | Refusal | Push | Disconnect
