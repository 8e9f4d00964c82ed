"""Every order of events at one producer, against a model that keeps books of its own."""

from collections.abc import Callable, Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_epoch import Pack, ProducerAction, ProducerEpoch, Ready, Release
from rdt_plan.testing import accepted_moves, num_examples, serve_table

Key = tuple[str, int]  # a ring and a seq
GROUPS = (0, 1, 2)


class ProducerMachine(RuleBasedStateMachine):
    """One epoch. ``waits`` holds, by announced chunk, the live readers whose DONE is missing."""

    @initialize(
        rings=st.lists(
            st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 3)), max_size=3
        ),
        num_slots=st.integers(1, 3),
        lookahead=st.integers(0, 2),
        direct=st.sets(st.integers(0, 4)),
        standing=st.sets(st.sampled_from(GROUPS)),
    )
    def begin(
        self,
        rings: list[tuple[list[int], int]],
        num_slots: int,
        lookahead: int,
        direct: set[int],
        standing: set[int],
    ) -> None:
        self.num_slots, self.lookahead = num_slots, lookahead
        self.direct, self.standing = direct, standing  # seqs, of every ring; groups
        self.groups_of = {f"plan {i}": sorted(groups) for i, (groups, _) in enumerate(rings)}
        self.readers: dict[str, set[ConsumerId]] = {
            f"plan {i}": {ConsumerId(replica, i) for replica in range(num_readers)}
            for i, (_, num_readers) in enumerate(rings)
        }
        self.ring_of = {c: ring for ring, each in self.readers.items() for c in each}
        self.epoch = ProducerEpoch(
            {
                consumer: serve_table(consumer, self.groups_of[ring], num_slots, ring, direct)
                for consumer, ring in self.ring_of.items()
            },
            GROUPS,
            lookahead,
            standing,
        )
        self.published: list[int] = []
        self.released: list[int] = []
        self.started: set[Key] = set()
        self.to_enqueue: list[Key] = []
        self.enqueued: list[Key] = []
        self.waits: dict[Key, set[ConsumerId]] = {}
        self.read: set[Key] = set()  # by every live reader
        self.ends: list[ProducerAction] = []
        self.aborted = False

    # ---- events --------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return not self.ends and not self.aborted

    @precondition(lambda self: self.is_running() and self.may_publish())
    @rule()
    def publish(self) -> None:
        group = GROUPS[len(self.published)]
        self.published.append(group)
        self.perform(self.epoch.publish(group))

    @precondition(lambda self: self.to_enqueue)
    @rule(data=st.data())
    def enqueue(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.to_enqueue))
        self.to_enqueue.remove(key)
        self.enqueued.append(key)
        assert self.epoch.pack_enqueued(*key) == []

    @precondition(lambda self: self.enqueued)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ring, seq = key = data.draw(st.sampled_from(self.enqueued))
        self.enqueued.remove(key)
        actions = self.epoch.packed(ring, seq)
        readies = [action for action in actions if isinstance(action, Ready)]
        live = sorted(self.readers[ring]) if self.is_running() else []
        assert readies == [Ready(reader, seq) for reader in live]
        self.waits[key] = set(live)
        self.perform([action for action in actions if action not in readies])

    @precondition(lambda self: self.to_enqueue or self.enqueued)
    @rule(data=st.data())
    def fail_pack(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.to_enqueue + self.enqueued))
        (self.to_enqueue if key in self.to_enqueue else self.enqueued).remove(key)
        self.waits[key] = set()
        self.aborted |= self.is_running() and bool(self.readers[key[0]])
        self.perform(self.epoch.pack_failed(*key, "injected"))

    @precondition(lambda self: any(self.waits.values()))
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        owed = sorted((reader, key) for key, each in self.waits.items() for reader in each)
        reader, key = data.draw(st.sampled_from(owed))
        self.waits[key].discard(reader)
        self.perform(self.epoch.done(reader, key[1]))

    @precondition(lambda self: self.ring_of)
    @rule(data=st.data())
    def done_that_nobody_waits_for(self, data: st.DataObject) -> None:
        """Repeated or of a dropped consumer: harmless. Before its READY: the peer's fault."""
        reader = data.draw(st.sampled_from(sorted(self.ring_of)))
        ring = self.ring_of[reader]
        for seq in range(len(self.groups_of[ring])):
            if reader in self.waits.get((ring, seq), ()):
                continue
            early = self.is_running() and reader in self.readers[ring]
            if early and (ring, seq) not in self.waits:
                try:
                    self.epoch.done(reader, seq)
                except PeerProtocolError:
                    continue
                raise AssertionError(f"the DONE of {seq} by {reader} was taken before its READY")
            assert self.epoch.done(reader, seq) == []

    @precondition(lambda self: self.ring_of)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.ring_of)))
        ring = self.ring_of[reader]
        self.readers[ring].discard(reader)
        for key, each in self.waits.items():
            if key[0] == ring:
                each.discard(reader)
        self.perform(self.epoch.drop(reader, "gone"))

    @rule(really=st.integers(0, 9))
    def abort(self, really: int) -> None:
        if not really and not self.ends:
            self.aborted = True
            self.perform(self.epoch.abort("enough"))

    @rule()
    def what_was_not_asked_for_is_refused(self) -> None:
        """And changes nothing: `accepted_moves` tries each on a copy."""
        wrong: list[Callable[[ProducerEpoch], Sequence[ProducerAction]]] = []
        for ring, groups in self.groups_of.items():
            for seq in range(-1, len(groups) + 1):
                if (ring, seq) not in self.to_enqueue:
                    wrong.append(lambda epoch, r=ring, s=seq: epoch.pack_enqueued(r, s))
                if (ring, seq) not in self.enqueued:
                    wrong.append(lambda epoch, r=ring, s=seq: epoch.packed(r, s))
                if (ring, seq) not in self.to_enqueue + self.enqueued:
                    wrong.append(lambda epoch, r=ring, s=seq: epoch.pack_failed(r, s, "why"))
        for group in range(4):
            if not (self.is_running() and self.may_publish()) or group != len(self.published):
                wrong.append(lambda epoch, g=group: epoch.publish(g))
        assert accepted_moves(self.epoch, wrong) == []

    # ---- what the epoch may and must do ----------------------------------------------------------

    def may_publish(self) -> bool:
        if len(self.published) == len(GROUPS):
            return False
        unreleased = set(self.published) - set(self.released) - self.standing
        return GROUPS[len(self.published)] in self.standing or len(unreleased) <= self.lookahead

    def perform(self, actions: Sequence[ProducerAction]) -> None:
        for action in actions:
            assert not self.ends, f"{action} after the end"
            match action:
                case Pack(ring, seq):
                    assert self.is_running() and seq in self.startable(ring)
                    self.started.add((ring, seq))
                    self.to_enqueue.append((ring, seq))
                case Release(group):
                    assert group in self.published and not self.is_held(group)
                    self.released.append(group)
                case Finished() | Quiesced():
                    assert not self.to_enqueue and not self.enqueued
                    assert isinstance(action, Quiesced) is self.aborted
                    self.ends.append(action)
                case Ready():
                    raise AssertionError(f"{action} of a chunk whose pack did not just end")

    def startable(self, ring: str) -> set[int]:
        """The seqs whose packs may start now: of published groups, and direct or next in turn.

        The slot of the next in turn has been read by all.
        """
        groups = self.groups_of[ring]
        if not self.readers[ring]:
            return set()
        slotted = [seq for seq in range(len(groups)) if seq not in self.direct]
        at = sum((ring, seq) in self.started for seq in slotted)
        before = at - self.num_slots
        is_free = before < 0 or self.is_read((ring, slotted[before]))
        seqs = set(slotted[at : at + 1] if is_free else ()) | self.direct
        return {
            seq
            for seq in seqs
            if seq < len(groups)
            and groups[seq] in self.published
            and (ring, seq) not in self.started
        }

    def is_read(self, key: Key) -> bool:
        return key in self.waits and not self.waits[key]

    def is_held(self, group: int) -> bool:
        """By a live reader that has not read a chunk of it, or by a pack in flight."""
        return any(
            its == group
            and ((ring, seq) in self.to_enqueue + self.enqueued or bool(self.readers[ring]))
            and not self.is_read((ring, seq))
            for ring, groups in self.groups_of.items()
            for seq, its in enumerate(groups)
        )

    @invariant()
    def nothing_that_may_happen_is_left_undone(self) -> None:
        if not hasattr(self, "epoch"):
            return
        in_flight = self.to_enqueue + self.enqueued
        if self.is_running():
            assert self.epoch.state is EpochState.RUNNING
            assert self.epoch.may_publish() is self.may_publish()
            assert not any(map(self.startable, self.groups_of))
            held = [group for group in self.published if self.is_held(group)]
            assert sorted(self.released) == [g for g in self.published if g not in held]
            assert held or len(self.released) < len(GROUPS)
            assert self.epoch.waiting_for() != "nothing"
        elif self.ends:
            over = EpochState.QUIESCED if self.aborted else EpochState.FINISHED
            assert self.epoch.state is over and self.epoch.waiting_for() == "nothing"
            assert self.aborted or sorted(self.released) == list(GROUPS)
        else:
            assert self.epoch.state is EpochState.ABORTING and in_flight

    def teardown(self) -> None:
        """Whoever does its part brings the epoch to its end."""
        if not hasattr(self, "epoch"):
            return
        while not self.ends:
            if self.enqueued:
                ring, seq = key = self.enqueued.pop()
                live = sorted(self.readers[ring]) if self.is_running() else []
                self.waits[key] = set(live)
                actions = self.epoch.packed(ring, seq)
                self.perform([each for each in actions if not isinstance(each, Ready)])
            elif self.to_enqueue:
                self.enqueued.append(self.to_enqueue.pop())
                self.epoch.pack_enqueued(*self.enqueued[-1])
            elif self.is_running() and self.may_publish():
                self.publish()
            else:
                key, reader = next((k, r) for k, each in self.waits.items() for r in each)
                self.waits[key].discard(reader)
                self.perform(self.epoch.done(reader, key[1]))
        self.nothing_that_may_happen_is_left_undone()


TestProducerMachine = ProducerMachine.TestCase
TestProducerMachine.settings = settings(
    max_examples=num_examples(120),
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
