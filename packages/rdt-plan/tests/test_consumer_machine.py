"""Every order of events at one consumer, against a model that keeps books of its own."""

from collections.abc import Callable, Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch, PostRead, Scatter
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError
from rdt_plan.testing import accepted_moves, num_examples, read_chunks

Move = Callable[[ConsumerEpoch], list[ConsumerAction]]


class ConsumerMachine(RuleBasedStateMachine):
    """One epoch. A chunk goes from each list to the next: ``reading`` .. ``installed``.

    A direct one goes from ``reading`` to ``installed``.
    """

    @initialize(
        owners=st.lists(st.integers(0, 2), max_size=7),
        num_slots=st.integers(1, 3),
        direct=st.sets(st.integers(0, 6)),
        num_lanes=st.integers(1, 3),
    )
    def begin(self, owners: list[int], num_slots: int, direct: set[int], num_lanes: int) -> None:
        lanes = {owner: owner % min(num_lanes, num_slots) for owner in range(3)}
        self.num_slots = num_slots
        self.owners = owners
        self.direct = direct & set(range(len(owners)))
        self.slotted = [index for index in range(len(owners)) if index not in direct]
        self.lanes = [
            [index for index in self.slotted if lanes[owners[index]] == lane] for lane in range(3)
        ]
        self.num_receive_slots = [  # of each lane
            num_slots // (max(lanes.values()) + 1) + (lane < num_slots % (max(lanes.values()) + 1))
            for lane in range(3)
        ]
        self.seqs = [owners[:index].count(owner) for index, owner in enumerate(owners)]
        self.announced: set[int] = set()
        self.reading: list[int] = []
        self.landed: set[int] = set()
        self.handed_out: list[int] = []
        self.scattering: list[int] = []
        self.installed: set[int] = set()
        self.posted: set[int] = set()
        self.num_handed_out = [0, 0, 0]
        self.aborted = False
        self.end: Finished | Quiesced | None = None
        chunks = read_chunks(owners, num_slots, direct, lanes)
        self.epoch = ConsumerEpoch(chunks, num_slots, lanes)
        self.perform(self.epoch.begin())

    # ---- events --------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.end is None and not self.aborted

    def may_be_announced(self, index: int) -> bool:
        """By a producer that waits for the DONE of the chunk before it in the serve slot."""
        if index in self.direct:
            return True
        before = [i for i in self.slotted if i < index and self.owners[i] == self.owners[index]]
        return len(before) < self.num_slots or before[-self.num_slots] in self.posted

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        """Of any chunk, in time, too early, or again."""
        index = data.draw(st.integers(0, len(self.owners) - 1))
        owner, seq = self.owners[index], self.seqs[index]
        if not self.is_running or index in self.announced:
            assert self.epoch.ready(owner, seq) == []
        elif self.may_be_announced(index):
            self.announced.add(index)
            self.perform(self.epoch.ready(owner, seq))
        else:
            try:
                self.epoch.ready(owner, seq)
            except PeerProtocolError:
                return
            raise AssertionError(f"READY of chunk {index} was taken for an unread serve slot")

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def read(self, data: st.DataObject, fails: int) -> None:
        index = data.draw(st.sampled_from(self.reading))
        self.reading.remove(index)
        if not fails:
            self.aborted = True
            self.perform(self.epoch.read_failed(index, "injected"))
        else:
            (self.installed if index in self.direct else self.landed).add(index)
            self.perform(self.epoch.read_done(index))

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    def enqueue(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.handed_out))
        self.handed_out.remove(index)
        self.scattering.append(index)
        self.perform(self.epoch.scatter_enqueued(index))

    @precondition(lambda self: self.scattering)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.scattering))
        self.scattering.remove(index)
        self.installed.add(index)
        self.perform(self.epoch.scatter_completed(index))

    @precondition(lambda self: self.handed_out or self.scattering)
    @rule(data=st.data(), really=st.integers(0, 4))
    def fail_scatter(self, data: st.DataObject, really: int) -> None:
        if not really:
            index = data.draw(st.sampled_from(self.handed_out + self.scattering))
            (self.handed_out if index in self.handed_out else self.scattering).remove(index)
            self.aborted = True
            self.perform(self.epoch.scatter_failed(index, "injected"))

    @rule(really=st.integers(0, 9))
    def abort(self, really: int) -> None:
        if not really and self.end is None:
            self.aborted = True
            self.perform(self.epoch.abort("enough"))

    @rule()
    def what_was_not_asked_for_is_refused(self) -> None:
        """And changes nothing: `accepted_moves` tries each on a copy."""
        wrong: list[Move] = [lambda epoch: epoch.ready(7, 0), lambda epoch: epoch.begin()]
        for i in range(-1, len(self.owners) + 1):
            if i not in self.reading:
                wrong += [lambda e, i=i: e.read_done(i), lambda e, i=i: e.read_failed(i, "why")]
            if i not in self.handed_out:
                wrong.append(lambda e, i=i: e.scatter_enqueued(i))
            if i not in self.scattering:
                wrong.append(lambda e, i=i: e.scatter_completed(i))
            if i not in self.handed_out + self.scattering:
                wrong.append(lambda e, i=i: e.scatter_failed(i, "why"))
        assert accepted_moves(self.epoch, wrong) == []

    # ---- what the epoch may and must do ----------------------------------------------------------

    @property
    def in_flight(self) -> list[int]:
        return [*self.reading, *self.handed_out, *self.scattering]

    def may_be_posted(self) -> set[int]:
        """Of those that take a slot: a lane's reads go in order, each into a slot that is free."""
        found = set()
        for slotted, num_slots in zip(self.lanes, self.num_receive_slots, strict=True):
            at = sum(index in self.posted for index in slotted)
            if at < len(slotted) and slotted[at] in self.announced:
                if at < num_slots or slotted[at - num_slots] in self.installed:
                    found.add(slotted[at])
        return found

    def to_hand_out(self) -> dict[int, int]:
        """The chunk whose scatter is next in each lane, and that lane."""
        return {
            slotted[num_handed_out]: lane
            for lane, (slotted, num_handed_out) in enumerate(
                zip(self.lanes, self.num_handed_out, strict=True)
            )
            if num_handed_out < len(slotted)
        }

    def perform(self, actions: Sequence[ConsumerAction]) -> None:
        for action in actions:
            assert self.end is None, f"{action} after the end"
            match action:
                case PostRead(index):
                    assert self.is_running and index in self.announced - self.posted
                    assert index in self.direct or index in self.may_be_posted()
                    self.posted.add(index)
                    self.reading.append(index)
                case Scatter(index):
                    assert self.is_running and index in self.to_hand_out()
                    self.landed.remove(index)
                    self.num_handed_out[self.to_hand_out()[index]] += 1
                    self.handed_out.append(index)
                case Finished() | Quiesced():
                    assert not self.in_flight
                    assert isinstance(action, Quiesced) is self.aborted
                    self.end = action

    @invariant()
    def nothing_that_may_happen_is_left_undone(self) -> None:
        if not hasattr(self, "epoch"):
            return
        if self.is_running:
            assert self.epoch.state is EpochState.RUNNING
            assert not self.may_be_posted()
            assert self.announced & self.direct <= self.posted
            assert not self.to_hand_out().keys() & self.landed
            assert len(self.installed) < len(self.owners)
            assert self.epoch.waiting_for() != "nothing"
        elif self.end is None:
            assert self.epoch.state is EpochState.ABORTING and self.in_flight
        else:
            over = EpochState.QUIESCED if self.aborted else EpochState.FINISHED
            assert self.epoch.state is over and self.epoch.waiting_for() == "nothing"
            assert self.aborted or len(self.installed) == len(self.owners)

    def teardown(self) -> None:
        """Whoever does its part brings the epoch to its end."""
        while hasattr(self, "epoch") and self.end is None:
            if self.scattering:
                self.installed.add(index := self.scattering.pop())
                self.perform(self.epoch.scatter_completed(index))
            elif self.handed_out:
                self.scattering.append(index := self.handed_out.pop())
                self.perform(self.epoch.scatter_enqueued(index))
            elif self.reading:
                index = self.reading.pop()
                (self.installed if index in self.direct else self.landed).add(index)
                self.perform(self.epoch.read_done(index))
            else:
                index = min(set(range(len(self.owners))) - self.announced)
                self.announced.add(index)
                self.perform(self.epoch.ready(self.owners[index], self.seqs[index]))
        self.nothing_that_may_happen_is_left_undone()


TestConsumerMachine = ConsumerMachine.TestCase
TestConsumerMachine.settings = settings(
    max_examples=num_examples(120),
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
