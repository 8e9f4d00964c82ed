"""One epoch of one consumer: drives the pure `ConsumerEpoch` over the wire.

Everything here runs on the progress thread, but for `settled`, which callers wait on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rdt_plan import (
    Chunk,
    ConsumerEpoch,
    EpochRecord,
    EpochState,
    Finished,
    PostRead,
    Quiesced,
    Scatter,
    SyncPlan,
)
from rdt_transport.attachment import Attachment
from rdt_transport.errors import PeerLostError, RdtTransportError, SyncAbortedError
from rdt_transport.events import Event
from rdt_transport.intervals import Intervals
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["OnChunk", "Pulling", "SyncStats"]

OnChunk = Callable[[Chunk, torch.Tensor], None]


@dataclass(slots=True)
class SyncStats:
    """What one epoch did. ``read`` and ``scatter`` sum over chunks that may overlap in time.

    ``bytes_direct`` landed in the model's own tensors, ``bytes_staged`` in slots.
    """

    epoch: int
    num_chunks: int
    bytes_direct: int = 0
    bytes_staged: int = 0
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: {"ready": 0.0, "read": 0.0, "scatter": 0.0, "total": 0.0}
    )

    @property
    def bytes_pulled(self) -> int:
        """All bytes that crossed the wire."""
        return self.bytes_direct + self.bytes_staged


class Pulling:
    """An open epoch. `settled` is set when it ended; `error` then says how (None: complete).

    `decided` is set with the first error already, or with `settled`: how it ends is then known.
    Nothing is read or handed out before ``idle`` has completed: until then, what was enqueued
    before the sync may use the model's tensors.
    """

    def __init__(
        self,
        plan: SyncPlan,
        attachment: Attachment,
        record: EpochRecord,
        on_chunk: OnChunk,
        idle: Event,
        intervals: Intervals | None = None,
    ) -> None:
        self.record = record
        self.stats = SyncStats(record.epoch, len(plan.chunks))
        self.settled = threading.Event()
        self.decided = threading.Event()
        self.error: BaseException | None = None
        self._plan = plan
        self._attachment = attachment
        self._on_chunk = on_chunk
        self._idle = idle
        self._intervals = intervals
        self._early: list[tuple[int, int]] = []  # READYs that came before the beginning
        self._machine = ConsumerEpoch(plan.chunks, plan.num_slots, plan.lanes)
        self._scattering: list[tuple[int, Event]] = []
        self._since: dict[int, float] = {}
        self._started = self._posted = time.perf_counter()

    def waiting_for(self) -> str:
        """What holds the epoch up, for a timeout's message (any thread)."""
        if self._machine.state is EpochState.NEW:
            return "what was enqueued on the device before the sync"
        return self._machine.waiting_for()

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        self.error = self.error or error
        self.decided.set()

    def begin(self, wire: Wire) -> None:
        """Open the epoch, or have `poll` do it when the device is idle."""
        if self._machine.state is EpochState.NEW and self._idle.query():
            self._perform(wire, self._machine.begin())
            for owner, seq in self._early:
                self.ready(wire, owner, seq)

    def ready(self, wire: Wire, owner: int, seq: int) -> None:
        """Producer ``owner`` says that chunk ``seq`` is readable."""
        if self._machine.state is EpochState.NEW:
            self._early.append((owner, seq))
        else:
            self._perform(wire, self._machine.ready(owner, seq))

    def read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        """A posted read ended."""
        index = self._attachment.index(event.handle)
        if isinstance(event, ReadFailed):
            self._read_failed(wire, index, event.reason, None)
            return
        chunk = self._plan.chunks[index]
        if chunk.is_direct:
            self.stats.bytes_direct += chunk.serve.num_bytes
        else:
            self.stats.bytes_staged += chunk.serve.num_bytes
        self._lap("read", index)
        self._perform(wire, self._machine.read_done(index))

    def scattered(self, wire: Wire, index: int, event: Event) -> None:
        """The copies out of chunk ``index``'s slot are enqueued, ``event`` recorded after them."""
        self._perform(wire, self._machine.scatter_enqueued(index))
        self._scattering.append((index, event))
        self.poll(wire)

    def scatter_failed(self, wire: Wire, index: int, error: BaseException) -> None:
        """Chunk ``index`` was not, or will not be, installed."""
        self.fail(error)
        self._perform(wire, self._machine.scatter_failed(index, str(error)))

    def poll(self, wire: Wire) -> None:
        """Free the slots whose scatter has completed."""
        if self._machine.state is EpochState.NEW:
            self.begin(wire)
        waiting, self._scattering = self._scattering, []
        for index, event in waiting:
            if event.query():
                self._lap("scatter", index)
                self._perform(wire, self._machine.scatter_completed(index))
            else:
                self._scattering.append((index, event))

    def abort(self, wire: Wire, error: BaseException) -> None:
        """Start nothing new; settles once nothing is in flight. Ignored when settled."""
        if not self.settled.is_set():
            self.fail(error)
            self._perform(wire, self._machine.abort(str(error)))

    def _perform(self, wire: Wire, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case PostRead(index):
                    self._post(wire, self._plan.chunks[index])
                case Scatter(index):
                    chunk = self._plan.chunks[index]
                    self._on_chunk(chunk, self._attachment.packed(chunk))
                case Finished():
                    self._settle()
                case Quiesced(reason):
                    self.fail(
                        SyncAbortedError(
                            f"consumer {self._plan.consumer}, epoch {self.record.epoch}: {reason}"
                        )
                    )
                    self._settle()

    def _post(self, wire: Wire, chunk: Chunk) -> None:
        now = time.perf_counter()
        if not self._since:
            self.stats.stage_seconds["ready"] = now - self._started
        if self._intervals is not None:
            self._intervals.add("ready", chunk.index, self._posted)
        self._since[chunk.index] = self._posted = now
        try:
            self._attachment.post(wire, chunk, self.record)
        except RdtTransportError as error:
            self._read_failed(wire, chunk.index, str(error), error)

    def _read_failed(
        self, wire: Wire, index: int, reason: str, cause: BaseException | None
    ) -> None:
        chunk = self._plan.chunks[index]
        error = PeerLostError(
            f"consumer {self._plan.consumer}: reading chunk {index} (seq {chunk.serve.seq}) from "
            f"producer {chunk.owner} failed: {reason}"
        )
        error.__cause__ = cause
        self.fail(error)
        self._perform(wire, self._machine.read_failed(index, reason))

    def _lap(self, stage: str, index: int) -> None:
        now = time.perf_counter()
        if self._intervals is not None:
            self._intervals.add(stage, index, self._since[index])
        self.stats.stage_seconds[stage] += now - self._since[index]
        self._since[index] = now

    def _settle(self) -> None:
        self.stats.stage_seconds["total"] = time.perf_counter() - self._started
        self.settled.set()
        self.decided.set()
