"""One producer's epoch: which chunk to pack, what to announce, which group to release.

Pure: events go in by method calls, actions come out as lists, in the order to perform them. The
legal moves of a chunk are those of `rdt_plan.transitions`. Any other raises `ProtocolError` (we
broke the protocol) or `PeerProtocolError` (a consumer did) and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdt_plan._serve_stream import ServeStream
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError, PlanError, ProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.table import ChunkTable
from rdt_plan.transitions import SERVE_TRANSITIONS, ServeEvent, ServeState

__all__ = ["Pack", "ProducerAction", "ProducerEpoch", "Ready", "Release"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Pack chunk ``seq`` of ``consumer`` into its serve slot, then report `pack_enqueued`."""

    consumer: ConsumerId
    seq: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell ``consumer`` that its chunk ``seq`` is readable."""

    consumer: ConsumerId
    seq: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the tensors of ``group`` any more: neither a live consumer nor a pack."""

    group: int


ProducerAction = Pack | Ready | Release | Finished | Quiesced

_MAX_NAMED = 4  # consumers that one text names


class ProducerEpoch:
    """Decides one epoch of one producer.

    Chunks are packed in seq order a consumer, each when its group is published and its serve slot
    is free (DONE of the chunk that used it before). A group is released when every live consumer's
    chunks of it are DONE and no pack of it is in flight; one that nobody reads, when published.

    Args:
        tables: the chunk table of every live consumer.
        groups: this rank's gather groups, in schedule order.
        lookahead: published groups that may be unreleased beyond the oldest one.

    An epoch without groups is FINISHED from the start. Raises `PlanError` when a table contradicts
    ``groups`` or itself.
    """

    def __init__(
        self, tables: Mapping[ConsumerId, ChunkTable], groups: Sequence[int], lookahead: int
    ) -> None:
        if lookahead < 0:
            raise ProtocolError(f"lookahead: expected at least 0, found {lookahead}")
        self._groups = tuple(groups)
        self._lookahead = lookahead
        self._positions = {group: position for position, group in enumerate(self._groups)}
        if len(self._positions) != len(self._groups):
            raise PlanError(f"groups repeat: {self._groups}")
        self._streams = {
            consumer: ServeStream(consumer, tables[consumer].chunks) for consumer in sorted(tables)
        }
        # What holds a group: chunks that a live consumer has not read, and packs in flight.
        self._holders: dict[int, set[tuple[ConsumerId, int]]] = {
            group: set() for group in self._groups
        }
        for consumer, stream in self._streams.items():
            stream.check_schedule(self._positions)
            for chunk in stream.chunks:
                self._holders[chunk.group].add((consumer, chunk.seq))
        self._num_published = 0
        self._unreleased: list[int] = []
        self._packs: set[tuple[ConsumerId, int]] = set()
        self._reason = ""
        self._state = EpochState.RUNNING if self._groups else EpochState.FINISHED

    @property
    def state(self) -> EpochState:
        return self._state

    def may_publish(self) -> bool:
        """Whether a next group exists and at most ``lookahead`` published ones are unreleased."""
        return (
            self._state is EpochState.RUNNING
            and self._num_published < len(self._groups)
            and len(self._unreleased) <= self._lookahead
        )

    def publish(self, group: int) -> list[ProducerAction]:
        """The tensors of ``group`` are there until it is released."""
        if self._state is not EpochState.RUNNING:
            raise ProtocolError(f"publish of group {group}: the epoch is {self._state.value}")
        expected = self._groups[self._num_published :][:1]
        if expected != (group,):
            raise ProtocolError(f"publish of group {group}: expected {expected or 'no group'}")
        if not self.may_publish():
            raise ProtocolError(
                f"publish of group {group}: groups {self._unreleased} are unreleased, "
                f"the lookahead is {self._lookahead}"
            )
        self._num_published += 1
        self._unreleased.append(group)
        actions: list[ProducerAction] = []
        for consumer in self._streams:
            actions += self._advance(consumer)
        return actions + self._release()

    def pack_enqueued(self, consumer: ConsumerId, seq: int) -> list[ProducerAction]:
        """The copies of this pack are enqueued, its event recorded after."""
        self._move(consumer, seq, ServeEvent.PACK_ENQUEUED)
        return []

    def packed(self, consumer: ConsumerId, seq: int) -> list[ProducerAction]:
        """The event recorded after this pack has completed: its serve slot is readable.

        Expected of a dropped consumer's packs as well: until then they read the group's tensors.
        """
        self._move(consumer, seq, ServeEvent.PACKED)
        return self._pack_ended(consumer, seq, [Ready(consumer, seq)])

    def pack_failed(self, consumer: ConsumerId, seq: int, reason: str) -> list[ProducerAction]:
        """Nothing reads or writes for this pack any more, but its serve slot is not readable.

        Also how a driver gives a pack back that it will not make because of an abort or a drop.
        The epoch is aborted unless the consumer was dropped.
        """
        self._move(consumer, seq, ServeEvent.PACK_FAILED)
        if self._state is EpochState.RUNNING and self._streams[consumer].live:
            self._packs.discard((consumer, seq))
            name = self._name(consumer, seq)
            return self.abort(f"consumer {consumer}: pack of {name} failed: {reason}")
        return self._pack_ended(consumer, seq, [])

    def done(self, consumer: ConsumerId, seq: int) -> list[ProducerAction]:
        """``consumer`` has read chunk ``seq``. A repeat is harmless, as is a dropped consumer's.

        Raises `PeerProtocolError` for a chunk that is not in its table or was not announced.
        """
        stream = self._streams.get(consumer)
        if stream is None or not 0 <= seq < len(stream.chunks):
            raise PeerProtocolError(f"consumer {consumer}: DONE of seq {seq}, which is not planned")
        state = stream.states[seq]
        if self._state is not EpochState.RUNNING or not stream.live or state is ServeState.READ:
            return []
        if (state, ServeEvent.DONE) not in SERVE_TRANSITIONS:
            raise PeerProtocolError(
                f"consumer {consumer}: DONE of {self._name(consumer, seq)} before its READY"
            )
        self._move(consumer, seq, ServeEvent.DONE)
        self._holders[stream.chunks[seq].group].discard((consumer, seq))
        return self._advance(consumer) + self._release()

    def drop(self, consumer: ConsumerId, reason: str) -> list[ProducerAction]:
        """Go on without ``consumer``: nothing is emitted for it any more. Idempotent.

        Its serve slots are free at once. Packs for it that are in flight still hold their groups,
        since they read the tensors.
        """
        stream = self._streams.get(consumer)
        if stream is None:
            raise ProtocolError(f"drop of consumer {consumer} ({reason}): it takes no part")
        if not stream.live:
            return []
        stream.live = False
        for seq, chunk in enumerate(stream.chunks):
            if (consumer, seq) not in self._packs:
                self._holders[chunk.group].discard((consumer, seq))
        return self._release() if self._state is EpochState.RUNNING else []

    def abort(self, reason: str) -> list[ProducerAction]:
        """Start nothing new; `Quiesced` comes once no pack is in flight, and frees every group.

        Idempotent: the first reason stays. Ignored when the epoch has finished.
        """
        if self._state is not EpochState.RUNNING:
            return []
        self._state = EpochState.ABORTING
        self._reason = reason
        return self._quiesce()

    def waiting_for(self) -> str:
        """What holds this epoch up, for the message of a timeout; "nothing" when it is over."""
        if self.may_publish():
            return f"group {self._groups[self._num_published]} to be published"
        if self._state is EpochState.RUNNING:
            held = self._holders[self._unreleased[0]]
        elif self._state is EpochState.ABORTING:
            held = self._packs
        else:
            return "nothing"
        # A consumer's first chunk is what holds up its later ones.
        first = dict(sorted(held, reverse=True))
        waits = [
            f"consumer {consumer}: {self._streams[consumer].states[seq].value}".format(
                self._name(consumer, seq)
            )
            for consumer, seq in sorted(first.items())
        ]
        more = [f"and {len(waits) - _MAX_NAMED} more consumers"] if waits[_MAX_NAMED:] else []
        return "; ".join(waits[:_MAX_NAMED] + more)

    def _advance(self, consumer: ConsumerId) -> list[ProducerAction]:
        """Start every pack of one consumer that may start, in seq order."""
        stream = self._streams[consumer]
        actions: list[ProducerAction] = []
        while stream.live and stream.next_seq < len(stream.chunks):
            seq = stream.next_seq
            if self._positions[stream.chunks[seq].group] >= self._num_published:
                break
            if not stream.has_free_slot(seq):
                break
            self._move(consumer, seq, ServeEvent.STARTED)
            stream.next_seq += 1
            self._packs.add((consumer, seq))
            actions.append(Pack(consumer, seq))
        return actions

    def _pack_ended(
        self, consumer: ConsumerId, seq: int, actions: list[ProducerAction]
    ) -> list[ProducerAction]:
        self._packs.discard((consumer, seq))
        if self._state is EpochState.ABORTING:
            return self._quiesce()
        stream = self._streams[consumer]
        if stream.live:
            return actions
        self._holders[stream.chunks[seq].group].discard((consumer, seq))
        return self._release()

    def _release(self) -> list[ProducerAction]:
        """Release every published group that nothing holds; notice the end."""
        actions: list[ProducerAction] = []
        for group in [each for each in self._unreleased if not self._holders[each]]:
            self._unreleased.remove(group)
            actions.append(Release(group))
        if self._num_published == len(self._groups) and not self._unreleased:
            self._state = EpochState.FINISHED
            actions.append(Finished())
        return actions

    def _quiesce(self) -> list[ProducerAction]:
        if self._packs:
            return []
        self._state = EpochState.QUIESCED
        return [Quiesced(self._reason)]

    def _move(self, consumer: ConsumerId, seq: int, event: ServeEvent) -> None:
        stream = self._streams.get(consumer)
        if stream is None or not 0 <= seq < len(stream.chunks):
            raise ProtocolError(
                f"consumer {consumer}: {event.value} of seq {seq}, which is not planned"
            )
        if (stream.states[seq], event) not in SERVE_TRANSITIONS:
            raise ProtocolError(
                f"consumer {consumer}: {event.value} of {self._name(consumer, seq)}, "
                f"which is {stream.states[seq].name}, in an epoch that is {self._state.value}"
            )
        stream.states[seq] = SERVE_TRANSITIONS[stream.states[seq], event]

    def _name(self, consumer: ConsumerId, seq: int) -> str:
        chunk = self._streams[consumer].chunks[seq]
        return f"seq {seq} (group {chunk.group}, {chunk.tensors})"
