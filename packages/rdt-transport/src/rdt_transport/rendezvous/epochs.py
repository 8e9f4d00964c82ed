"""The epochs of one session: one is open at a time, and its record is frozen.

Pure: part of `JobState`.
"""

from collections.abc import Mapping, Sequence

from rdt_plan import ConsumerId
from rdt_plan.records import EpochRecord
from rdt_transport.errors import EpochFailedError, RendezvousError, TornError
from rdt_transport.rendezvous.events import EpochFailed
from rdt_transport.rendezvous.outcome import DroppedReplica, EpochOutcome
from rdt_transport.rendezvous.requests import Missing

__all__ = ["EpochLedger", "Live"]

Live = tuple[ConsumerId, str]  # a consumer and its incarnation


class EpochLedger:
    """Issues epochs 1, 2, ... and knows who may still commit the last one.

    Attributes:
        last: the last epoch that was begun; 0 before the first.
        record: its frozen record.
        failures: why each failed epoch was given up.
    """

    def __init__(self) -> None:
        self.last = 0
        self.record: EpochRecord | None = None
        self.failures: dict[int, str] = {}
        self._live: dict[ConsumerId, str] = {}  # of the last epoch; drops shrink it
        self._committed: set[ConsumerId] = set()
        self._granted: dict[ConsumerId, tuple[str, int]] = {}  # each one's last commit
        self._replicas: dict[int, list[Live]] = {}
        self._dropped: dict[int, str] = {}  # replicas that will not have the last epoch, and why
        self._begun: set[int] = set()  # ranks that know the last epoch's record
        self._told = False  # how the last epoch ended: nothing changes it any more

    @property
    def is_open(self) -> bool:
        """True while a live consumer of the last epoch has neither committed nor been dropped."""
        return self.last not in self.failures and len(self._live) > len(self._committed)

    def uncommitted(self) -> list[Live]:
        """Who is still live in the last epoch without having committed it."""
        return [live for live in sorted(self._live.items()) if live[0] not in self._committed]

    def waiting_for(self, missing: list[Live]) -> str:
        """That those have not committed the last epoch, as a sentence."""
        names = ", ".join(str(consumer) for consumer, _ in missing)
        verb = "consumer {} has" if len(missing) == 1 else "consumers {} have"
        return f"{verb.format(names)} not committed epoch {self.last}"

    def find(self, epoch: int | None) -> EpochRecord | Missing:
        """The open epoch's record, or that of the last one when its number is given.

        Raises `EpochFailedError` for a failed epoch, `RendezvousError` for one that is over.
        """
        if epoch is None:
            if self.record is None or not self.is_open:
                return Missing(lambda: "no epoch is open")
            return self.record
        if epoch in self.failures:
            raise EpochFailedError(f"epoch {epoch} failed: {self.failures[epoch]}")
        if epoch > self.last:
            return Missing(lambda: f"the last epoch is {self.last}")
        if self.record is None or epoch < self.last:
            raise RendezvousError(f"epoch {epoch} is over; the last epoch is {self.last}")
        return self.record

    def begin(self, rank: int, epoch: int) -> EpochRecord | Missing:
        """Like `find`, for a producer: the next epoch waits until every rank has come for it."""
        found = self.find(epoch)
        self._begun.add(rank)
        return found

    def next_waits_for(self, num_producers: int) -> Missing | None:
        """What keeps the next epoch from opening; None when nothing does."""
        if self.is_open:
            return self._open_yet()
        late = [rank for rank in range(num_producers) if rank not in self._begun]
        if not late or self.last == 0 or self.last in self.failures:
            return None  # who comes late for a failed epoch is told so
        ranks = ", ".join(map(str, late))
        return Missing(lambda: f"producer {ranks} has not begun epoch {self.last}")

    def _open_yet(self) -> Missing:
        return Missing(lambda: self.waiting_for(self.uncommitted()))

    def end_of(self, epoch: int, late: Sequence[int]) -> EpochOutcome | Missing:
        """How the epoch ended, once all ranks ask; raises as `find` does.

        ``late`` are the ranks that do not ask now: one whose ask was refused may fail it yet.
        """
        if isinstance(found := self.find(epoch), Missing):
            return found
        if self.is_open:
            return self._open_yet()
        if late and not self._told:
            ranks = ", ".join(map(str, late))
            return Missing(lambda: f"producer {ranks} is not through epoch {epoch}")
        self._told = True
        committed = sorted({consumer.replica for consumer in self._committed})
        dropped = [DroppedReplica(*each) for each in sorted(self._dropped.items())]
        return EpochOutcome(epoch, tuple(committed), tuple(dropped))

    def open(
        self, session: str, live: tuple[Live, ...], rank: int, absent: Mapping[int, str]
    ) -> EpochRecord:
        """Begin the next epoch for ``live``, as ``rank`` asked; the last one must be closed.

        ``absent`` are the replicas that take no part, and why.
        """
        assert live and not self.is_open
        self.last += 1
        self.record = EpochRecord(session=session, epoch=self.last, live=live)
        self._live, self._committed, self._replicas = dict(live), set(), {}
        self._dropped = dict(absent)
        self._begun, self._told = {rank}, False
        for consumer, incarnation in live:
            self._replicas.setdefault(consumer.replica, []).append((consumer, incarnation))
        return self.record

    def fail(self, reason: str) -> EpochFailed | None:
        """End the last epoch as failed; None when its end is known (the first reason stays)."""
        if self.record is None or self._told or self.last in self.failures:
            return None
        self.failures[self.last] = reason
        return EpochFailed(self.last, reason)

    def give_up(self, epoch: int, reason: str) -> EpochFailed | None:
        """Like `fail`, for that very epoch; raises `RendezvousError` when it has not begun."""
        if epoch > self.last:
            raise RendezvousError(f"epoch {epoch} cannot fail: the last one is {self.last}")
        return self.fail(reason) if epoch == self.last else None

    def drop(self, consumer: ConsumerId, incarnation: str, reason: str) -> EpochFailed | None:
        """Take a dropped consumer out; an epoch that loses everybody has failed.

        Also one that has committed, until the epoch's end is told: its server may have failed.
        """
        is_over = self._told or self.last in self.failures
        if is_over or self._live.get(consumer) != incarnation:
            return None
        del self._live[consumer]
        self._committed.discard(consumer)
        self._dropped.setdefault(consumer.replica, reason)
        if self._live:
            return None
        why = "; ".join(f"replica {each}: {said}" for each, said in sorted(self._dropped.items()))
        return self.fail(f"no replica is left: {why}")

    def may_leave(self, consumer: ConsumerId) -> bool:
        """True when the open epoch, if any, does not need that consumer any more."""
        return not self.is_open or consumer not in self._live or consumer in self._committed

    def is_committed(self, consumer: ConsumerId, incarnation: str, epoch: int) -> bool:
        """True when that incarnation's last commit is of ``epoch``, which may be over by now."""
        return self._granted.get(consumer) == (incarnation, epoch)

    def replica_of(self, consumer: ConsumerId, incarnation: str, epoch: int) -> list[Live]:
        """The workers that must commit together; raises `TornError` when this one may not."""
        if epoch in self.failures:
            why = f"epoch {epoch} failed: {self.failures[epoch]}"
        elif epoch != self.last:
            why = f"the last epoch is {self.last}"
        elif self._live.get(consumer) != incarnation:
            why = f"this incarnation is not live in epoch {epoch}"
        else:
            return self._replicas[consumer.replica]  # falls as one, so it is still whole
        raise TornError(
            f"consumer {consumer} may not commit epoch {epoch}: {why}; what it holds is torn until "
            "it completes a sync"
        )

    def commit(self, replica: list[Live]) -> None:
        """Grant the commit of the last epoch to these workers."""
        for consumer, incarnation in replica:
            self._committed.add(consumer)
            self._granted[consumer] = (incarnation, self.last)
