"""One consumer's epoch: which READ to post, which scatter to start, and when it is over.

Pure: events go in by method calls, actions come out as lists, in the order to perform them. The
legal moves are those of `rdt_plan.transitions`. Any other raises `ProtocolError` (we broke
the protocol) or `PeerProtocolError` (a producer did) and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdt_plan.chunks import Chunk
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError, PlanError, ProtocolError
from rdt_plan.lanes import Lane
from rdt_plan.slots import SlotRing, SlotState
from rdt_plan.transitions import (
    ABORTING_TRANSITIONS,
    CHUNK_TRANSITIONS,
    ChunkEvent,
    ChunkState,
)

__all__ = ["ConsumerAction", "ConsumerEpoch", "PostRead", "Scatter"]


@dataclass(frozen=True, slots=True)
class PostRead:
    """Post the prepared READ of chunk ``index``: both ends of it are ready."""

    index: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Chunk ``index`` lies in its receive slot: scatter it, then report `scatter_enqueued`."""

    index: int


ConsumerAction = PostRead | Scatter | Finished | Quiesced


_UNPOSTED = frozenset({ChunkState.AWAITED, ChunkState.READABLE})
_IN_FLIGHT = frozenset({ChunkState.READING, ChunkState.HANDED_OUT, ChunkState.SCATTERING})


class ConsumerEpoch:
    """Decides one epoch of one consumer.

    In each lane, READs into slots are posted strictly in plan order. One is posted when its READY
    came and its receive slot is free: the scatter of the chunk that used it before is enqueued and
    its event completed. They may complete in any order; scatters are handed out in plan order,
    since a module begins with its first chunk and is complete with its last. Lanes do not wait for
    each other.

    The READ of a direct chunk is posted as soon as its READY came, in any order, and with its end
    the chunk is installed.

    Args:
        chunks: the plan's chunks, in plan order.
        num_slots: receive slots.
        lanes: the lane of each owner (`SyncPlan.lanes`); None: all are of one.

    Raises `PlanError` when the chunks contradict each other.
    """

    def __init__(
        self, chunks: Sequence[Chunk], num_slots: int, lanes: Mapping[int, int] | None = None
    ) -> None:
        self._chunks = tuple(chunks)
        self._num_slots = num_slots
        self._ring = SlotRing(num_slots)
        self._index_of: dict[tuple[int, int], int] = {}
        self._slot_of: dict[int, int] = {}  # the receive slot of every chunk that is not direct
        self._served_before: dict[int, int] = {}  # the chunk that had the same serve slot before
        self._lanes: dict[int, Lane] = {}
        self._lane_of: dict[int, Lane] = {}  # of every chunk that is not direct
        lane_of_slot: dict[int, Lane] = {}
        last_in_serve_slot: dict[tuple[int, int], int] = {}
        for index, chunk in enumerate(self._chunks):
            key = (chunk.owner, chunk.serve.seq)
            slot, serve_slot = chunk.receive_slot, chunk.serve.serve_slot
            if chunk.index != index or (slot is not None and not 0 <= slot < num_slots):
                raise PlanError(
                    f"chunk {chunk.index} in receive slot {slot}: "
                    f"expected index {index} and a slot below {num_slots}"
                )
            if key in self._index_of:
                raise PlanError(f"chunk {index}: producer {key[0]} has two chunks of seq {key[1]}")
            self._index_of[key] = index
            if (slot is None) is not (serve_slot is None):
                raise PlanError(f"chunk {index}: expected two slots or none: it is direct or not")
            if slot is not None and serve_slot is not None:
                self._slot_of[index] = slot
                lane = self._lanes.setdefault(lanes[chunk.owner] if lanes else 0, Lane())
                lane.slotted.append(index)
                self._lane_of[index] = lane
                if lane_of_slot.setdefault(slot, lane) is not lane:
                    raise PlanError(f"chunk {index}: receive slot {slot} is of another lane")
                if (before := last_in_serve_slot.get((chunk.owner, serve_slot))) is not None:
                    self._served_before[index] = before
                last_in_serve_slot[chunk.owner, serve_slot] = index
        self._states = [ChunkState.AWAITED] * len(self._chunks)
        self._generations = [0] * len(self._chunks)
        self._num_installed = 0
        self._in_flight: set[int] = set()
        self._reason = ""
        self._state = EpochState.NEW

    @property
    def state(self) -> EpochState:
        return self._state

    def begin(self) -> list[ConsumerAction]:
        """Start; an empty plan is finished at once."""
        if self._state is not EpochState.NEW:
            raise ProtocolError(f"begin: the epoch is {self._state.value} already")
        self._state = EpochState.RUNNING
        return self._advance()

    def ready(self, owner: int, seq: int) -> list[ConsumerAction]:
        """Producer ``owner`` says that its chunk ``seq`` is readable. A repeat is harmless.

        Raises `PeerProtocolError` for a chunk that is not in the plan, and for one that took a
        serve slot whose chunk has not been read.
        """
        if self._state is EpochState.NEW:
            raise ProtocolError(f"READY of producer {owner} (seq {seq}) before begin")
        index = self._index_of.get((owner, seq))
        if index is None:
            raise PeerProtocolError(f"producer {owner}: READY of seq {seq}, which is not planned")
        if self._state is not EpochState.RUNNING or self._states[index] is not ChunkState.AWAITED:
            return []
        before = self._served_before.get(index)
        # Posted is all we can ask for: our DONE may reach the producer before our own poll tells
        # us that the READ is complete.
        if before is not None and self._states[before] in _UNPOSTED:
            raise PeerProtocolError(
                f"producer {owner}: READY of seq {seq} in serve slot "
                f"{self._chunks[index].serve.serve_slot}, whose {self._name(before)} is not read"
            )
        self._move(index, ChunkEvent.READY)
        if index in self._slot_of:
            return self._advance()
        self._move(index, ChunkEvent.POSTED)
        return [PostRead(index)]

    def read_done(self, index: int) -> list[ConsumerAction]:
        """All bytes of chunk ``index`` are where its READ takes them.

        In its receive slot, they wait for the turn of its scatter; those of a direct chunk are
        installed.
        """
        is_direct = 0 <= index < len(self._chunks) and index not in self._slot_of
        self._move(index, ChunkEvent.DIRECT_READ_DONE if is_direct else ChunkEvent.READ_DONE)
        if self._state is not EpochState.RUNNING:
            return self._quiesce()
        if is_direct:
            self._num_installed += 1
            return self._finish()
        actions: list[ConsumerAction] = []
        lane = self._lane_of[index]
        for index in self._from(lane, lane.num_handed_out):
            if self._states[index] is not ChunkState.LANDED:
                break
            self._move(index, ChunkEvent.HANDED_OUT)
            lane.num_handed_out += 1
            actions.append(Scatter(index))
        return actions

    def read_failed(self, index: int, reason: str) -> list[ConsumerAction]:
        """The READ of chunk ``index`` ended with an error; the epoch is aborted."""
        return self._lose(index, ChunkEvent.READ_FAILED, f"READ failed: {reason}")

    def scatter_enqueued(self, index: int) -> list[ConsumerAction]:
        """Every copy out of the receive slot of ``index`` is enqueued, its event recorded after."""
        self._check_move(index, ChunkEvent.SCATTER_ENQUEUED)
        self._ring.enqueued(self._slot_of[index], self._generations[index])
        self._move(index, ChunkEvent.SCATTER_ENQUEUED)
        return []

    def scatter_completed(self, index: int) -> list[ConsumerAction]:
        """The event recorded after the scatter of ``index`` has completed: its slot is free."""
        self._check_index(index)
        if index not in self._slot_of:
            raise ProtocolError(f"scatter_completed of {self._name(index)}, which is direct")
        # The ring decides: a completion of an earlier use of the slot must not free it.
        self._ring.completed(self._slot_of[index], self._generations[index])
        self._move(index, ChunkEvent.SCATTER_COMPLETED)
        self._num_installed += 1
        return self._advance() if self._state is EpochState.RUNNING else self._quiesce()

    def scatter_failed(self, index: int, reason: str) -> list[ConsumerAction]:
        """Nothing reads the receive slot of ``index`` any more, but it was not installed whole.

        Also how an installer gives a chunk back that it will not scatter because of an abort.
        The epoch is aborted.
        """
        self._check_move(index, ChunkEvent.SCATTER_FAILED)
        if self._states[index] is ChunkState.SCATTERING:
            self._ring.completed(self._slot_of[index], self._generations[index])
        return self._lose(index, ChunkEvent.SCATTER_FAILED, f"scatter failed: {reason}")

    def abort(self, reason: str) -> list[ConsumerAction]:
        """Start nothing new; `Quiesced` comes once no READ or scatter is in flight.

        Idempotent: the first reason stays. Ignored when the epoch has finished.
        """
        if self._state not in (EpochState.NEW, EpochState.RUNNING):
            return []
        self._state = EpochState.ABORTING
        self._reason = reason
        return self._quiesce()

    def waiting_for(self) -> str:
        """What holds this epoch up, for the message of a timeout; "nothing" when it is over."""
        if self._state is EpochState.NEW:
            return "begin"
        unposted = (i for i, state in enumerate(self._states) if state in _UNPOSTED)
        if self._state is EpochState.RUNNING and (first := next(unposted, None)) is not None:
            if self._states[first] is ChunkState.AWAITED:
                return self._wait_of(first)
            slot = self._slot_of[first]
            holder = self._ring.use(slot)
            if holder is not None:
                name = self._name(first)
                return f"{name}: receive slot {slot}, still used by {self._wait_of(holder)}"
        if self._in_flight:
            return self._wait_of(min(self._in_flight))
        return "nothing"

    def _advance(self) -> list[ConsumerAction]:
        """Post every READ into a slot that may go, in the order of its lane; notice the end."""
        actions: list[ConsumerAction] = []
        for lane in self._lanes.values():
            for index in self._from(lane, lane.num_posted):
                slot = self._slot_of[index]
                if self._states[index] is not ChunkState.READABLE:
                    break
                if self._ring.state(slot) is not SlotState.FREE:
                    break
                self._generations[index] = self._ring.acquire(slot, index)
                self._move(index, ChunkEvent.POSTED)
                lane.num_posted += 1
                actions.append(PostRead(index))
        return actions + self._finish()

    def _from(self, lane: Lane, position: int) -> Sequence[int]:
        """The chunks of a lane from a position on; no more are in their slots at a time."""
        return lane.slotted[position : position + self._num_slots]

    def _finish(self) -> list[ConsumerAction]:
        if self._num_installed < len(self._chunks):
            return []
        self._state = EpochState.FINISHED
        return [Finished()]

    def _lose(self, index: int, event: ChunkEvent, reason: str) -> list[ConsumerAction]:
        self._move(index, event)
        if self._state is EpochState.RUNNING:
            return self.abort(f"{self._name(index)}: {reason}")
        return self._quiesce()

    def _quiesce(self) -> list[ConsumerAction]:
        if self._in_flight:
            return []
        self._state = EpochState.QUIESCED
        return [Quiesced(self._reason)]

    def _move(self, index: int, event: ChunkEvent) -> None:
        self._check_move(index, event)
        aborting = self._state is EpochState.ABORTING
        table = ABORTING_TRANSITIONS if aborting else CHUNK_TRANSITIONS
        self._states[index] = table[self._states[index], event]
        if self._states[index] in _IN_FLIGHT:
            self._in_flight.add(index)
        else:
            self._in_flight.discard(index)

    def _check_move(self, index: int, event: ChunkEvent) -> None:
        self._check_index(index)
        if (self._states[index], event) not in CHUNK_TRANSITIONS:
            raise ProtocolError(
                f"{event.value} of {self._wait_of(index)}, in an epoch that is {self._state.value}"
            )

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._chunks):
            raise ProtocolError(f"chunk {index} is not in a plan of {len(self._chunks)} chunks")

    def _name(self, index: int) -> str:
        chunk = self._chunks[index]
        serve = chunk.serve
        return f"chunk {index} (seq {serve.seq}, {serve.tensors}) of producer {chunk.owner}"

    def _wait_of(self, index: int) -> str:
        return f"{self._name(index)}: {self._states[index].value}"
