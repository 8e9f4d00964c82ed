"""The DONEs that reach a producer, each handed to the epoch that it is of."""

import logging

from rdt_plan import Doorbell, Kind, Mailbox, Verdict
from rdt_transport.serve_rings import ServeRings
from rdt_transport.serving import Serving
from rdt_transport.wire.base import Wire

__all__ = ["DoneMail"]

_logger = logging.getLogger(__name__)


class DoneMail:
    """Used on the progress thread only: the mailbox and whom it delivers to move together.

    Args:
        rank: the producer's, for the log.
        num_slots: the job's.
        rings: who may ring.
    """

    def __init__(self, rank: int, num_slots: int, rings: ServeRings) -> None:
        self._rank = rank
        self._rings = rings
        self._mailbox = Mailbox(num_slots)
        self._addressee: Serving | None = None

    def open(self, wire: Wire, serving: Serving) -> None:
        """Deliver to ``serving`` from now on, and what came early for it."""
        self._addressee = serving
        record = serving.record
        for doorbell in self._mailbox.open(bytes.fromhex(record.session), record.epoch):
            self._deliver(wire, serving, doorbell)

    def accept(self, wire: Wire, sender: str, doorbell: Doorbell) -> None:
        """Of this epoch, of the next (kept), or stale or of a stranger (dropped)."""
        served = self._rings.get(doorbell.sender)
        if served is None or served.wire_name != sender:
            _logger.debug("producer %d: dropped a doorbell of %s", self._rank, sender)
            return
        verdict = self._mailbox.accept(doorbell)
        if doorbell.kind is Kind.DONE and verdict is Verdict.DELIVER and self._addressee:
            self._deliver(wire, self._addressee, doorbell)

    def _deliver(self, wire: Wire, serving: Serving, doorbell: Doorbell) -> None:
        if (served := self._rings.get(doorbell.sender)) is not None:
            serving.done(wire, served, doorbell.seq)
