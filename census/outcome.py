"""What becomes of one case: its status, and the two exceptions that lead to one."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "MOST_PULLED",
    "UNSERVED",
    "Outcome",
    "RefusedError",
    "Status",
    "WrongError",
    "overpulling",
]


UNSERVED = "exact before post-processing, which a worker refuses to run again for "
"""How the reason begins of what is exact, and yet quantised in a way that no worker serves."""


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


MOST_PULLED = 1.05
"""Bytes that may be pulled for each byte that lands."""


def overpulling(bytes_pulled: int, bytes_landed: int) -> str:
    """Why it is wrong to pull as much; empty where it is not.

    >>> overpulling(106, 100)
    'pulls 1.06 bytes for each byte that lands, at most 1.05 may be'
    """
    if bytes_pulled <= MOST_PULLED * bytes_landed:
        return ""
    ratio = bytes_pulled / bytes_landed if bytes_landed else float("inf")
    return f"pulls {ratio:.2f} bytes for each byte that lands, at most {MOST_PULLED} may be"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's result.

    Attributes:
        status: its status.
        reason: one line; of what is exact, what else there is to say, or nothing.
        bytes_pulled: of the slices that cross the wire, without padding; 0 where nothing does.
        bytes_landed: what of them reaches the model, counted in the slices' dtypes.
        unread: names of the checkpoint's that this rank pulls nothing of.
    """

    status: Status
    reason: str = ""
    bytes_pulled: int = 0
    bytes_landed: int = 0
    unread: frozenset[str] = frozenset()


class RefusedError(Exception):
    """The implementation refuses the model; the message is the reason."""


class WrongError(Exception):
    """Something is not as it must be; the message is the reason."""
