"""One producer's epoch: which chunk to pack, what to announce, which group to release.

Pure: events go in by method calls, actions come out as lists, in the order to perform them. The
legal moves of a chunk are those of `rdt_plan.transitions`. Any other raises `ProtocolError` (we
broke the protocol) or `PeerProtocolError` (a consumer did) and changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence

from rdt_plan._serve_stream import ServeStream
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError, PlanError, ProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_actions import Pack, ProducerAction, Ready, Release
from rdt_plan.table import ChunkTable
from rdt_plan.transitions import SERVE_TRANSITIONS, ServeEvent

__all__ = ["Pack", "ProducerAction", "ProducerEpoch", "Ready", "Release"]


_MAX_NAMED = 4  # consumers that one text names


class ProducerEpoch:
    """Decides one epoch of one producer.

    Consumers of one plan digest read one serve ring, each chunk of which is packed once. Chunks
    are packed in seq order a ring, each when its group is published and its serve slot is free:
    DONE from every live reader of the chunk that used it before. Direct chunks need no slot and
    wait for no other: they start with their group. A group is released when every live consumer's
    chunks of it are DONE and no pack of it is in flight; one that nobody reads, when published.

    Args:
        tables: the chunk table of every live consumer.
        groups: this rank's gather groups, in schedule order.
        lookahead: published groups that may be unreleased beyond the oldest one.
        standing: groups whose tensors are there anyway: they do not count against the lookahead.

    Attributes:
        num_incomplete: groups, from the first, that leave every replica without something that it
            reads here: it cannot commit before one more is published.

    An epoch without groups is FINISHED from the start. Raises `PlanError` when a table contradicts
    ``groups``, itself, or another one of its plan digest.
    """

    def __init__(
        self,
        tables: Mapping[ConsumerId, ChunkTable],
        groups: Sequence[int],
        lookahead: int,
        standing: Collection[int] = (),
    ) -> None:
        if lookahead < 0:
            raise ProtocolError(f"lookahead: expected at least 0, found {lookahead}")
        self._groups = tuple(groups)
        self._lookahead = lookahead
        self._standing = frozenset(standing)
        self._positions = {group: position for position, group in enumerate(self._groups)}
        if len(self._positions) != len(self._groups):
            raise PlanError(f"groups repeat: {self._groups}")
        self._ring_of = {consumer: tables[consumer].plan_digest for consumer in sorted(tables)}
        self._streams = {
            ring: ServeStream({c: tables[c] for c, its in self._ring_of.items() if its == ring})
            for ring in dict.fromkeys(self._ring_of.values())
        }
        # What holds a group: chunks that a live consumer has not read, and packs in flight.
        self._holders: dict[int, set[tuple[str, int]]] = {group: set() for group in self._groups}
        for ring, stream in self._streams.items():
            stream.check_schedule(self._positions)
            for chunk in stream.chunks:
                self._holders[chunk.group].add((ring, chunk.seq))
        last: dict[int, int] = {}  # by replica, which commits as one: where its last chunk is
        for consumer, ring in self._ring_of.items():
            for chunk in self._streams[ring].chunks[-1:]:
                position = self._positions[chunk.group]
                last[consumer.replica] = max(position, last.get(consumer.replica, 0))
        self.num_incomplete = min(last.values(), default=len(self._groups))
        self._num_published = 0
        self._unreleased: list[int] = []
        self._packs: set[tuple[str, int]] = set()
        self._reason = ""
        self._state = EpochState.RUNNING if self._groups else EpochState.FINISHED

    @property
    def state(self) -> EpochState:
        return self._state

    def may_publish(self) -> bool:
        """Whether a next group exists and there is room for it.

        There is for a standing one, and as long as at most ``lookahead`` published groups that are
        not standing are unreleased.
        """
        if self._state is not EpochState.RUNNING or self._num_published == len(self._groups):
            return False
        if self._groups[self._num_published] in self._standing:
            return True
        return sum(group not in self._standing for group in self._unreleased) <= self._lookahead

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
        for ring, stream in self._streams.items():
            if stream.readers:
                actions += [self._start(ring, seq) for seq in stream.direct.get(group, ())]
            actions += self._advance(ring)
        return actions + self._release()

    def pack_enqueued(self, ring: str, seq: int) -> list[ProducerAction]:
        """The copies of this pack are enqueued, its event recorded after."""
        self._move(ring, seq, ServeEvent.PACK_ENQUEUED)
        return []

    def packed(self, ring: str, seq: int) -> list[ProducerAction]:
        """The event recorded after this pack has completed: its serve slot is readable.

        Expected of the packs of a ring without live readers as well: until then they read the
        group's tensors.
        """
        self._move(ring, seq, ServeEvent.PACKED)
        return self._pack_ended(ring, seq)

    def pack_failed(self, ring: str, seq: int, reason: str) -> list[ProducerAction]:
        """Nothing reads or writes for this pack any more, but its serve slot is not readable.

        Also how a driver gives a pack back that it will not make because of an abort or a drop.
        The epoch is aborted unless the ring has no live reader.
        """
        self._move(ring, seq, ServeEvent.PACK_FAILED)
        stream = self._streams[ring]
        if self._state is EpochState.RUNNING and stream.readers:
            self._packs.discard((ring, seq))
            return self.abort(f"{stream.name}: pack of {self._name(ring, seq)} failed: {reason}")
        return self._pack_ended(ring, seq)

    def done(self, consumer: ConsumerId, seq: int) -> list[ProducerAction]:
        """``consumer`` has read chunk ``seq``. A repeat is harmless, as is a dropped consumer's.

        Raises `PeerProtocolError` for a chunk that is not in its table or was not announced.
        """
        ring = self._ring_of.get(consumer)
        if ring is None or not 0 <= seq < len(self._streams[ring].chunks):
            raise PeerProtocolError(f"consumer {consumer}: DONE of seq {seq}, which is not planned")
        stream = self._streams[ring]
        if self._state is not EpochState.RUNNING or not stream.owes(consumer, seq):
            return []
        if (stream.states[seq], ServeEvent.DONE) not in SERVE_TRANSITIONS:
            raise PeerProtocolError(
                f"consumer {consumer}: DONE of {self._name(ring, seq)} before its READY"
            )
        return self._read(ring, [seq]) if stream.read(consumer, seq) else []

    def drop(self, consumer: ConsumerId, reason: str) -> list[ProducerAction]:
        """Go on without ``consumer``: nothing is emitted for it any more. Idempotent.

        Nobody waits for its DONEs, so slots and groups may be free at once. Packs in flight of a
        ring without live readers still hold their groups, since they read the tensors.
        """
        ring = self._ring_of.get(consumer)
        if ring is None:
            raise ProtocolError(f"drop of consumer {consumer} ({reason}): it takes no part")
        stream = self._streams[ring]
        if consumer not in stream.readers:
            return []
        read = stream.leave(consumer)
        if not stream.readers:
            for seq, chunk in enumerate(stream.chunks):
                if (ring, seq) not in self._packs:
                    self._holders[chunk.group].discard((ring, seq))
        return self._read(ring, read) if self._state is EpochState.RUNNING else []

    def abort(self, reason: str) -> list[ProducerAction]:
        """Start nothing new; `Quiesced` comes once no pack is in flight, and frees every group.

        Sources of direct chunks may be read even then: they must stay until the rendezvous has
        noted the failure, since their reader could commit otherwise.

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
        waits: dict[str, str] = {}
        for ring, seq in sorted(held):  # a consumer's first chunk is what holds up its later ones
            stream = self._streams[ring]
            what = stream.states[seq].value.format(self._name(ring, seq))
            for consumer in stream.waits_for(seq):
                waits.setdefault(f"consumer {consumer}", what)
            if not stream.readers:
                waits.setdefault(stream.name, what)
        texts = [f"{who}: {what}" for who, what in sorted(waits.items())]
        more = [f"and {len(texts) - _MAX_NAMED} more consumers"] if texts[_MAX_NAMED:] else []
        return "; ".join(texts[:_MAX_NAMED] + more)

    def _advance(self, ring: str) -> list[ProducerAction]:
        """Start every pack into a slot of one ring that may start, in seq order."""
        stream = self._streams[ring]
        actions: list[ProducerAction] = []
        while stream.readers and stream.num_started < len(stream.slotted):
            seq = stream.slotted[stream.num_started]
            if self._positions[stream.chunks[seq].group] >= self._num_published:
                break
            if not stream.has_free_slot(seq):
                break
            stream.num_started += 1
            actions.append(self._start(ring, seq))
        return actions

    def _start(self, ring: str, seq: int) -> Pack:
        self._move(ring, seq, ServeEvent.STARTED)
        self._packs.add((ring, seq))
        return Pack(ring, seq)

    def _pack_ended(self, ring: str, seq: int) -> list[ProducerAction]:
        self._packs.discard((ring, seq))
        if self._state is EpochState.ABORTING:
            return self._quiesce()
        stream = self._streams[ring]
        if stream.readers:
            return [Ready(reader, seq) for reader in stream.readers]
        self._holders[stream.chunks[seq].group].discard((ring, seq))
        return self._release()

    def _read(self, ring: str, seqs: Sequence[int]) -> list[ProducerAction]:
        """No live reader has yet to read these chunks."""
        stream = self._streams[ring]
        for seq in seqs:
            self._move(ring, seq, ServeEvent.DONE)
            self._holders[stream.chunks[seq].group].discard((ring, seq))
        return self._advance(ring) + self._release()

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

    def _move(self, ring: str, seq: int, event: ServeEvent) -> None:
        stream = self._streams.get(ring)
        if stream is None or not 0 <= seq < len(stream.chunks):
            raise ProtocolError(f"ring {ring}: {event.value} of seq {seq}, which is not planned")
        if (stream.states[seq], event) not in SERVE_TRANSITIONS:
            raise ProtocolError(
                f"{stream.name}: {event.value} of {self._name(ring, seq)}, "
                f"which is {stream.states[seq].name}, in an epoch that is {self._state.value}"
            )
        stream.states[seq] = SERVE_TRANSITIONS[stream.states[seq], event]

    def _name(self, ring: str, seq: int) -> str:
        chunk = self._streams[ring].chunks[seq]
        return f"seq {seq} (group {chunk.group}, {chunk.tensors})"
