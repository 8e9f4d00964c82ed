"""One epoch on one trainer rank: gathers, publishes, drives the servers, and ends alike everywhere.

Decisions are `SyncState`'s; this file carries them out. The caller's thread runs `run`; failures
also arrive from the rendezvous.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rdt_plan import ConsumerId, EpochRecord
from rdt_trainer.collector import GroupCollector
from rdt_trainer.control import LAST_WORDS_SECONDS, Control
from rdt_trainer.driving import Driving
from rdt_trainer.errors import SourceError
from rdt_trainer.numbering import EpochNumbering
from rdt_trainer.report import SyncReport, bytes_pulled
from rdt_trainer.sync_errors import UNTOLD, raised_by
from rdt_trainer.sync_state import Cause, Consequence, Stage, SyncState
from rdt_transport.errors import EpochFailedError, RdtTransportError, SyncAbortedError
from rdt_transport.intervals import Intervals
from rdt_transport.producer import Producer
from rdt_transport.rendezvous import (
    ConnectionLost,
    ConsumerDropped,
    EpochFailed,
    EpochOutcome,
    RendezvousClient,
    RendezvousEvent,
)

__all__ = ["Sync"]

_logger = logging.getLogger(__name__)


class Sync:
    """An epoch that is being sent.

    Args:
        numbering: which epoch this is; kept in step.
        rank: this trainer rank.
        new_pass: starts a pass over the source.
        producer: serves the groups.
        num_bytes: of all of them.
        rendezvous: told of failures; asked how the epoch ended.
        control: drives the servers; None on ranks other than 0.
        restore: called before the epoch begins, to attach what fell before.
        timeout_seconds: of each single wait; longer than a whole sync takes.
    """

    def __init__(
        self,
        numbering: EpochNumbering,
        *,
        rank: int,
        new_pass: Callable[[], GroupCollector],
        producer: Producer,
        num_bytes: int,
        rendezvous: RendezvousClient,
        control: Control | None,
        restore: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        self.epoch = numbering.next
        self.record: EpochRecord | None = None
        self._numbering = numbering
        self._rank = rank
        self._new_pass = new_pass
        self._producer = producer
        self._num_bytes = num_bytes
        self._rendezvous = rendezvous
        self._control = control
        self._restore = restore
        self._timeout_seconds = timeout_seconds
        self._state = SyncState()
        self._lock = threading.Lock()
        self._driving: Driving | None = None
        self._dropped: list[tuple[ConsumerId, str]] = []  # since this sync was made
        self._consequence: Consequence | None = None
        self._collector: GroupCollector | None = None
        self._is_connected = self._is_told = True
        self._doing = Cause.BEGIN
        self._started = time.perf_counter()
        self._seconds = dict.fromkeys(("begin", "gather", "publish", "wait", "finish"), 0.0)
        self.intervals = Intervals()  # of "control": the steps that move no weights

    # ---- the caller's thread -----------------------------------------------------------------

    def run(self, weight_version: str | None) -> SyncReport:
        """Send the source's weights; raises as `RdtTrainer.send_weights` says."""
        outcome = None
        try:
            outcome = self._send(weight_version)
        except BaseException as error:
            self._fail(self._cause_of(error), error)
        finally:
            if self._driving is not None:
                self._driving.close()
        if outcome is None or self._state.failure is not None:
            self._give_up()
        assert outcome is not None and self.record is not None, "who gives up raises"
        dropped = {each.replica: each.reason for each in outcome.dropped}
        for replica, reason in dropped.items():
            _logger.warning("epoch %d: replica %d goes without: %s", self.epoch, replica, reason)
        return SyncReport(
            self.epoch,
            self._num_bytes,
            *bytes_pulled(self._producer.tables(self.record)),
            total_seconds=time.perf_counter() - self._started,
            committed=outcome.committed,
            dropped=dropped,
            **{f"{name}_seconds": spent for name, spent in self._seconds.items()},
        )

    def _send(self, weight_version: str | None) -> EpochOutcome:
        producer = self._producer
        # The servers' deadline comes first: it drops one replica, these fail everybody.
        timeout_seconds = self._timeout_seconds + LAST_WORDS_SECONDS
        with self._step("begin", Cause.BEGIN):
            self._restore()
            self.record = self._numbering.begin(self._open_epoch)
            producer.begin(self.record)
            self._advance(Stage.GATHER)
            if self._control is not None:
                self._drive(self._control, self.record, weight_version)
        groups = list(producer.groups)
        with self._step("gather", Cause.SOURCE_RAISED):
            self._collector = collector = self._new_pass()
        if collector.standing:
            with self._step("publish", Cause.PRODUCER):
                del groups[: producer.publish_standing(collector.standing, hold_back=True)]
        if self._driving is not None:
            self._driving.watch()
        if collector.standing:
            began = time.perf_counter()
            with self._step("gather", Cause.SOURCE_RAISED):
                collector.confirm(gently=producer.is_urgent())  # while they are read
            self.intervals.add("gather", producer.groups[-1], began)
        while groups:
            with self._step("publish", Cause.PRODUCER):
                if collector.standing:
                    del groups[: producer.publish_standing(collector.standing)]
                if not groups:
                    break
                producer.wait_for_credit(timeout_seconds)
            group = groups.pop(0)
            with self._step("gather", Cause.SOURCE_RAISED):
                tensors = collector.collect(group)
            with self._step("publish", Cause.PRODUCER):
                producer.publish(group, tensors, timeout_seconds)
            del tensors  # the producer's until the group is released, and nobody's after
            self._raise_failure()
        with self._step("gather", Cause.SOURCE_RAISED):
            collector.finish()
        self._advance(Stage.WAIT)
        with self._step("wait", Cause.PRODUCER):
            producer.finish(timeout_seconds)
        with self._step("wait", Cause.SOURCE_RAISED):
            collector.check_unchanged()
        self._advance(Stage.FINISH)
        with self._step("finish", Cause.PRODUCER):
            if self._driving is not None:
                self._driving.wait(timeout_seconds)
                self._raise_failure()
            outcome = self._rendezvous.await_close(self._rank, self.epoch, timeout_seconds)
        self._advance(Stage.DONE)
        return outcome

    def _drive(self, control: Control, record: EpochRecord, weight_version: str | None) -> None:
        version = str(self.epoch) if weight_version is None else weight_version
        driving = Driving(control, self._rendezvous, record, version, self._timeout_seconds)
        with self._lock:
            self._driving = driving
            dropped = self._dropped.copy()
        for each in dropped:
            driving.on_dropped(*each)

    def _open_epoch(self, epoch: int) -> EpochRecord:
        self.epoch = epoch
        timeout_seconds = self._timeout_seconds
        if self._control is None:  # rank 0 opens it, and may `restore` before for twice as long
            timeout_seconds += 2 * (timeout_seconds + LAST_WORDS_SECONDS)
        return self._rendezvous.begin(self._rank, epoch, timeout_seconds)

    @contextmanager
    def _step(self, name: str, cause: Cause) -> Generator[None]:
        """Time is spent on ``name``; what is raised within is of ``cause``."""
        self._doing = cause
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started
            if name in ("begin", "finish"):
                self.intervals.add("control", -1, started)

    def _advance(self, stage: Stage) -> None:
        with self._lock:
            self._state.advance(stage)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self._state.failure) is not None:
            raise failure.error

    def _cause_of(self, error: BaseException) -> Cause:
        if not isinstance(error, Exception):
            return Cause.INTERRUPT
        if self._doing is Cause.SOURCE_RAISED and isinstance(error, SourceError):
            return Cause.SOURCE_MISMATCH
        if self._state.stage is Stage.FINISH and isinstance(error, EpochFailedError):
            return Cause.PEER  # its event is on its way
        return self._doing

    # ---- failures, from any thread -----------------------------------------------------------

    def on_event(self, event: RendezvousEvent) -> None:
        """React to a push of the rendezvous."""
        match event:
            case EpochFailed(epoch, reason) if epoch == self.epoch:
                self._fail(Cause.PEER, SyncAbortedError(reason))
            case ConsumerDropped(consumer, incarnation):
                with self._lock:  # it may come before the servers are driven, or after
                    self._dropped.append((consumer, incarnation))
                    driving = self._driving
                if driving is not None:
                    driving.on_dropped(consumer, incarnation)
            case ConnectionLost(reason):
                self._is_connected = False
                self._fail(Cause.CONNECTION, SyncAbortedError(f"the rendezvous is gone: {reason}"))
            case _:
                pass

    def _fail(self, cause: Cause, error: BaseException) -> None:
        with self._lock:
            consequence = self._state.fail(cause, error)
            if consequence is None:
                return
            self._consequence = consequence
        if self._driving is not None:
            self._driving.stop()
        if consequence.stop:
            self._producer.fail(_as_exception(error))
        if consequence.tell:
            reason = f"trainer rank {self._rank}: {_as_exception(error)}"
            try:
                self._rendezvous.fail(self.epoch, reason)
            except RdtTransportError as problem:
                self._is_told = False
                _logger.info("epoch %d could not be failed: %s", self.epoch, problem)

    def _give_up(self) -> None:
        """Leave nothing behind that reads the sources or calls a server, then raise."""
        failure, consequence = self._state.failure, self._consequence
        assert failure is not None and consequence is not None
        error = failure.error
        notes = []
        if self.record is not None:
            try:
                self._producer.abort(_as_exception(error))
            except RdtTransportError as problem:
                notes.append(str(problem))
            if not (self._is_told and self._is_connected):
                notes.append(UNTOLD)  # of an epoch that did not begin here, nothing was published
        if consequence.discard:
            self._discard()
        if self._control is not None:
            if failure.cause is not Cause.INTERRUPT:
                self._control.wait(LAST_WORDS_SECONDS)
            notes += [f"{name} is still in a call" for name in self._control.busy()]
        raised = raised_by(
            failure.cause, error, rank=self._rank, epoch=self.epoch, connected=self._is_connected
        )
        cause = error
        if (driving := self._driving) is not None:
            notes += [each for each in driving.errors() if each not in str(raised)]
            if failure.cause is Cause.PEER and driving.lost is not None:
                cause = driving.lost
        for note in notes:
            raised.add_note(note)
        if raised is error:
            raise raised
        raise raised from cause

    def _discard(self) -> None:
        try:
            (self._collector or self._new_pass()).discard()
        except Exception:
            _logger.warning("the source raised while its pass was discarded", exc_info=True)


def _as_exception(error: BaseException) -> Exception:
    """An interrupt is the caller's alone: other threads and ranks only learn that one came."""
    return error if isinstance(error, Exception) else SyncAbortedError(type(error).__name__)
