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
    Finished,
    PostRead,
    Quiesced,
    Scatter,
    SyncPlan,
)
from rdt_transport.attachment import Attachment
from rdt_transport.errors import PeerLostError, RdtTransportError, SyncAbortedError
from rdt_transport.events import Event
from rdt_transport.wire.base import ReadDone, ReadFailed, Wire

__all__ = ["OnChunk", "Pulling", "SyncStats"]

OnChunk = Callable[[Chunk, torch.Tensor], None]


@dataclass(slots=True)
class SyncStats:
    """What one epoch did. ``read`` and ``scatter`` sum over chunks that may overlap in time."""

    epoch: int
    num_chunks: int
    bytes_pulled: int = 0
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: {"ready": 0.0, "read": 0.0, "scatter": 0.0, "total": 0.0}
    )


class Pulling:
    """An open epoch. `settled` is set when it ended; `error` then says how (None: complete).

    `decided` is set with the first error already, or with `settled`: how it ends is then known.
    """

    def __init__(
        self, plan: SyncPlan, attachment: Attachment, record: EpochRecord, on_chunk: OnChunk
    ) -> None:
        self.record = record
        self.stats = SyncStats(record.epoch, len(plan.chunks))
        self.settled = threading.Event()
        self.decided = threading.Event()
        self.error: BaseException | None = None
        self._plan = plan
        self._attachment = attachment
        self._on_chunk = on_chunk
        self._machine = ConsumerEpoch(plan.chunks, plan.num_slots)
        self._scattering: list[tuple[int, Event]] = []
        self._since: dict[int, float] = {}
        self._started = time.perf_counter()

    def waiting_for(self) -> str:
        """What holds the epoch up, for a timeout's message (any thread)."""
        return self._machine.waiting_for()

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        self.error = self.error or error
        self.decided.set()

    def begin(self, wire: Wire) -> None:
        """Open the epoch."""
        self._perform(wire, self._machine.begin())

    def ready(self, wire: Wire, owner: int, seq: int) -> None:
        """Producer ``owner`` says that chunk ``seq`` is readable."""
        self._perform(wire, self._machine.ready(owner, seq))

    def read(self, wire: Wire, event: ReadDone | ReadFailed) -> None:
        """A posted read ended."""
        index = self._attachment.index(event.handle)
        if isinstance(event, ReadFailed):
            self._read_failed(wire, index, event.reason, None)
            return
        self.stats.bytes_pulled += self._plan.chunks[index].serve.num_bytes
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
        if chunk.index == 0:
            self.stats.stage_seconds["ready"] = time.perf_counter() - self._started
        self._since[chunk.index] = time.perf_counter()
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
        self.stats.stage_seconds[stage] += now - self._since[index]
        self._since[index] = now

    def _settle(self) -> None:
        self.stats.stage_seconds["total"] = time.perf_counter() - self._started
        self.settled.set()
        self.decided.set()
