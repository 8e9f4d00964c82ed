"""What becomes of one case: its status, and the two exceptions that lead to one."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Outcome", "RefusedError", "Status", "WrongError"]


class Status(StrEnum):
    """In the order in which one of an architecture's ranks outweighs another."""

    UNBUILDABLE = "unbuildable"
    """This CPU, or the tiny checkpoint, does not get as far as a normal load."""
    EXACT = "exact"
    """The replay leaves what a normal load leaves, bit for bit."""
    REFUSED = "refused"
    """Refused when a worker initialises; nothing was changed."""
    WRONG = "wrong"
    """The replay differs from a normal load, or something raised that is no refusal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's result.

    Attributes:
        status: its status.
        reason: one line; empty when exact.
        bytes_pulled: of the slices that cross the wire, without padding; 0 where nothing does.
        bytes_landed: what of them reaches the model, counted in the slices' dtypes.
    """

    status: Status
    reason: str = ""
    bytes_pulled: int = 0
    bytes_landed: int = 0


class RefusedError(Exception):
    """The implementation refuses the model; the message is the reason."""


class WrongError(Exception):
    """Something is not as it must be; the message is the reason."""
