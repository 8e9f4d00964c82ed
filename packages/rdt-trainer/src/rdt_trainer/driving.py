"""The servers' share of one sync: driven at once, each dropped alone when its calls fail.

Decisions are `Replicas`'. Calls end on the client threads, deadlines are a timer's, drops are also
heard from the rendezvous.
"""

import logging
import threading
import time
from collections.abc import Callable

from rdt_plan import ConsumerId, EpochRecord
from rdt_trainer.control import Control
from rdt_trainer.errors import RdtTrainerError
from rdt_trainer.replicas import ReplicaEvent, Replicas
from rdt_transport.errors import RdtTransportError
from rdt_transport.rendezvous import RendezvousClient

__all__ = ["Driving"]

_logger = logging.getLogger(__name__)


class Driving:
    """Starts on construction, and drops nobody for being late before `watch`.

    Args:
        control: makes the calls.
        rendezvous: told whom to drop.
        record: of the epoch; its replicas are driven.
        weight_version: what the servers report from then on.
        timeout_seconds: from now until the last call of every server must have ended. A server
            that has not begun to pull at half time is dropped then: groups are held for it, so the
            others need the other half.
    """

    def __init__(
        self,
        control: Control,
        rendezvous: RendezvousClient,
        record: EpochRecord,
        weight_version: str,
        timeout_seconds: float,
    ) -> None:
        self._control = control
        self._rendezvous = rendezvous
        self._record = record
        self._timeout_seconds = timeout_seconds
        self._workers: dict[int, tuple[ConsumerId, str]] = {}  # one names its whole replica
        for consumer, incarnation in record.live:
            self._workers.setdefault(consumer.replica, (consumer, incarnation))
        self._replicas = Replicas(sorted(self._workers))
        self._telling = 0  # drops that the rendezvous has not heard yet
        self._errors: dict[int, BaseException] = {}  # the first of each replica's server
        self._changed = threading.Condition()
        self._stopped = False
        self._timers: list[threading.Timer] = []
        self._started = time.monotonic()
        # With the record itself, no worker need ask for it.
        control.sync(sorted(self._workers), record.to_json(), weight_version, self._on_end)

    def watch(self) -> None:
        """From now on whoever is late is dropped; not before, as a timer takes time to start.

        Called once, by who made this.
        """
        self._at(0.5, self._on_half_time)

    @property
    def lost(self) -> BaseException | None:
        """The first server's error, where servers' errors left no replica; None otherwise."""
        with self._changed:
            errors = list(self._errors.values())
            return errors[0] if errors and self._replicas.all_fell else None

    def errors(self) -> list[str]:
        """What servers said so far, a sentence each."""
        with self._changed:
            return [_words_of(error) for error in self._errors.values()]

    def wait(self, timeout_seconds: float) -> None:
        """Return when no replica is driven any more, or at `stop`, or at the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not (self._replicas.driven or self._telling),
                timeout_seconds,
            )

    def stop(self) -> None:
        """The outcome is known: nobody waits or is dropped. Calls go on by themselves."""
        with self._changed:
            self._stopped = True
            for timer in self._timers:
                timer.cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and leave no timer behind."""
        self.stop()
        for timer in self._timers:
            timer.join()

    def on_dropped(self, consumer: ConsumerId, incarnation: str) -> None:
        """The rendezvous dropped that consumer (any thread)."""
        if (consumer, incarnation) in self._record.live:
            self._note(consumer.replica, ReplicaEvent.DROPPED)

    def _on_end(self, replica: int, error: BaseException | None) -> None:
        """A server's calls have ended; on its client's thread."""
        if error is None:
            self._note(replica, ReplicaEvent.ENDED)
            return
        with self._changed:
            self._errors.setdefault(replica, error)
            if self._stopped:
                return
        if self._note(replica, ReplicaEvent.FAILED):
            self._drop(replica, _words_of(error))

    def _at(self, share: float, call: Callable[[], None]) -> None:
        """Make the call when that share of the time is over."""
        due = self._started + share * self._timeout_seconds
        timer = threading.Timer(max(0.0, due - time.monotonic()), call)
        timer.name = "rdt-deadline"
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _on_half_time(self) -> None:
        with self._changed:
            if self._stopped:
                return
            self._at(1.0, self._on_deadline)
            late = [each for each in self._replicas.driven if not self._control.is_finishing(each)]
        self._give_up(late, self._timeout_seconds / 2)

    def _on_deadline(self) -> None:
        with self._changed:
            late = self._replicas.driven
        self._give_up(late, self._timeout_seconds)

    def _give_up(self, replicas: list[int], waited_seconds: float) -> None:
        for replica in replicas:
            self._on_end(replica, self._control.overdue([replica], waited_seconds))

    def _drop(self, replica: int, reason: str) -> None:
        """Tell the rendezvous, then whoever waits."""
        epoch = self._record.epoch
        _logger.warning("epoch %d: replica %d is dropped: %s", epoch, replica, reason)
        try:
            self._rendezvous.drop(*self._workers[replica], reason, epoch=epoch)
        except RdtTransportError as problem:
            _logger.info("replica %d could not be dropped: %s", replica, problem)
        with self._changed:
            self._telling -= 1
            self._changed.notify_all()

    def _note(self, replica: int, event: ReplicaEvent) -> bool:
        with self._changed:
            tell = self._replicas.note(replica, event)
            self._telling += tell
            self._changed.notify_all()
            return tell


def _words_of(error: BaseException) -> str:
    known = isinstance(error, RdtTrainerError)
    return str(error) if known else f"{type(error).__name__}: {error}"
