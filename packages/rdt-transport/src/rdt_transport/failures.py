"""What the rendezvous said went wrong, kept for an epoch that this process has not opened yet."""

from rdt_transport.errors import RendezvousLostError, SyncAbortedError, TornError
from rdt_transport.rendezvous import (
    ConnectionLost,
    ConsumerDropped,
    EpochFailed,
    ProducerLost,
    RendezvousEvent,
)

__all__ = ["Failures"]


class Failures:
    """The reason an epoch of this party cannot succeed, whichever comes first: event or epoch.

    Any thread. ``incarnation`` is that of a consumer, whose own dropping ends all of its epochs.
    """

    def __init__(self, incarnation: bytes | None = None) -> None:
        self._incarnation = incarnation.hex() if incarnation is not None else None
        self._always: BaseException | None = None
        self._epoch: int | None = None
        self._error: BaseException | None = None

    def note(self, event: RendezvousEvent) -> None:
        """Remember what ``event`` means for epochs, if anything."""
        match event:
            case EpochFailed(epoch, reason):
                self._error = SyncAbortedError(f"epoch {epoch} failed: {reason}")
                self._epoch = epoch  # last: `of` looks at it first
            case ConnectionLost(reason):
                self._always = RendezvousLostError(f"the rendezvous is gone: {reason}")
            case ProducerLost(rank, reason):
                self._always = SyncAbortedError(f"producer {rank} is gone: {reason}")
            case ConsumerDropped(consumer, incarnation, reason):
                if incarnation == self._incarnation:
                    self._always = TornError(f"consumer {consumer} was dropped: {reason}")
            case _:
                pass

    def of(self, epoch: int) -> BaseException | None:
        """Why ``epoch`` cannot succeed; None as far as we know it can."""
        return self._error if self._epoch == epoch else self._always
