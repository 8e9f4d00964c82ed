"""The mailbox: which doorbells belong to the open epoch, and which to a later one.

A producer may enter an epoch before a consumer hears of it, so its doorbells can come early. They
are kept until that epoch opens: an early READY is never lost. What belongs to the past or to
another session is dropped and counted.

A sender's doorbells arrive in the order it sent them. So a sender seen in one epoch has left every
earlier one, and only those of its newest epoch are worth keeping. Its stream in one epoch cannot
run ahead of its reader by more than its serve slots and its direct chunks: `SyncPlan.max_unread` is
the natural ``kept_per_sender``.
"""

from enum import Enum

from rdt_plan.doorbell import ID_BYTES, Doorbell
from rdt_plan.errors import ProtocolError

__all__ = ["DropReason", "Mailbox", "Verdict"]


class Verdict(Enum):
    """What to do with a doorbell."""

    DELIVER = "deliver"  #: it belongs to the open epoch.
    KEPT = "kept"  #: it belongs to a later epoch; `Mailbox.open` returns it then.
    DROPPED = "dropped"  #: counted in `Mailbox.dropped`.


class DropReason(Enum):
    """Why a doorbell was dropped."""

    OLD_EPOCH = "old epoch"
    FOREIGN_SESSION = "foreign session"
    OVERFLOW = "overflow"


class Mailbox:
    """Sorts one receiver's doorbells by session and epoch.

    Before the first `open` nothing is known of the session: whatever comes is treated as a later
    epoch's, and `open` decides. Kept doorbells are bounded by ``kept_per_sender`` a sender; a
    repeated one takes no room.
    """

    def __init__(self, kept_per_sender: int) -> None:
        if kept_per_sender < 1:
            raise ProtocolError(f"kept_per_sender: expected at least 1, found {kept_per_sender}")
        self._kept_per_sender = kept_per_sender
        self._session: bytes | None = None
        self._epoch = 0
        self._kept: dict[bytes, dict[Doorbell, None]] = {}  # in the order in which they came
        self._dropped = dict.fromkeys(DropReason, 0)

    @property
    def dropped(self) -> dict[DropReason, int]:
        """How many doorbells were dropped so far, by reason."""
        return dict(self._dropped)

    def open(self, session: bytes, epoch: int) -> list[Doorbell]:
        """Open ``epoch`` (from 1) of ``session``; returns the kept doorbells that now apply.

        An open epoch of before is closed. Raises `ProtocolError` when the epoch is not later than
        the last one of that session.
        """
        if len(session) != ID_BYTES:
            raise ProtocolError(f"session: expected {ID_BYTES} bytes, found {len(session)}")
        last_epoch = self._epoch if session == self._session else 0
        if epoch <= last_epoch:
            raise ProtocolError(
                f"epoch {epoch} cannot open: epoch {last_epoch} of session {session.hex()} "
                "was opened before"
            )
        self._session, self._epoch = session, epoch
        kept, self._kept = self._kept, {}
        verdicts = [
            (doorbell, self.accept(doorbell)) for each in kept.values() for doorbell in each
        ]
        return [doorbell for doorbell, verdict in verdicts if verdict is Verdict.DELIVER]

    def accept(self, doorbell: Doorbell) -> Verdict:
        """Sort one doorbell; only `Verdict.DELIVER` is for the caller to act on now."""
        if self._session is not None:
            if doorbell.session != self._session:
                return self._drop(DropReason.FOREIGN_SESSION)
            if doorbell.epoch == self._epoch:
                return Verdict.DELIVER
            if doorbell.epoch < self._epoch:
                return self._drop(DropReason.OLD_EPOCH)
        return self._keep(doorbell)

    def _keep(self, doorbell: Doorbell) -> Verdict:
        kept = self._kept.setdefault(doorbell.sender, {})
        first = next(iter(kept), doorbell)
        if first.session == doorbell.session and doorbell.epoch < first.epoch:
            return self._drop(DropReason.OLD_EPOCH)
        if (first.session, first.epoch) != (doorbell.session, doorbell.epoch):
            foreign = first.session != doorbell.session
            reason = DropReason.FOREIGN_SESSION if foreign else DropReason.OLD_EPOCH
            self._dropped[reason] += len(kept)
            kept.clear()
        if doorbell in kept:
            return Verdict.KEPT
        if len(kept) >= self._kept_per_sender:
            return self._drop(DropReason.OVERFLOW)
        kept[doorbell] = None
        return Verdict.KEPT

    def _drop(self, reason: DropReason) -> Verdict:
        self._dropped[reason] += 1
        return Verdict.DROPPED
