"""Every order of requests and losses at the rendezvous, against books of its own."""

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rdt_plan import ConsumerId
from rdt_plan.records import EpochRecord, Subscription
from rdt_plan.testing import num_examples
from rdt_transport.errors import DisagreementError, EpochFailedError, RendezvousError, TornError
from rdt_transport.rendezvous import ConsumerDropped, ConsumerLeft, EpochFailed
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.epochs import EpochLedger
from rdt_transport.rendezvous.roster import Roster
from rdt_transport.testing.job_records import make_subscription
from rdt_transport.testing.state_driver import StateDriver, commit, subscribe

SIZES = (2, 1, 1)  # workers of each replica; the job starts without the last
CONSUMERS = [ConsumerId(r, w) for r, size in enumerate(SIZES) for w in range(size)]
Live = tuple[ConsumerId, str]


class RendezvousMachine(RuleBasedStateMachine):
    """Two producers, which begin epochs as they like, and replicas, which come and go."""

    @initialize()
    def start(self) -> None:
        self.driver = StateDriver(num_producers=2, num_replicas=2)
        self.replicas = {0, 1}
        self.watcher = self.driver.connect()
        self.num_heard = 0
        self.producers = [self.driver.producer(rank)[0] for rank in (0, 1)]
        self.members: dict[ConsumerId, tuple[int, Subscription]] = {}
        self.ready: set[Live] = set()
        self.fenced: list[Subscription] = []
        self.records: dict[int, EpochRecord] = {}
        self.begun: dict[int, int] = {0: 0, 1: 0}  # each rank's last epoch
        self.failed: set[int] = set()
        self.begins: dict[int, int] = {}  # the pending call of each rank
        self.asked: dict[Live, tuple[int, int]] = {}  # pending commits: epoch and call
        self.granted: set[tuple[Live, int]] = set()

    # ---- who comes, and who goes -----------------------------------------------------------------

    @rule(consumer=st.sampled_from(CONSUMERS))
    def come(self, consumer: ConsumerId) -> None:
        if consumer in self.members:
            return
        size = SIZES[consumer.replica]
        subscription = make_subscription(
            consumer.replica, consumer.worker, num_workers=size, owners=(0, 1)
        )
        client = self.driver.connect()
        if consumer.replica not in self.replicas:
            try:
                self.driver.call(client, subscribe(subscription))
            except DisagreementError:
                return
            raise AssertionError(f"{consumer} of no replica of the job was taken")
        self.driver.call(client, subscribe(subscription))
        self.members[consumer] = (client, subscription)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def be_ready(self, consumer: ConsumerId) -> None:
        if consumer in self.members:
            client, subscription = self.members[consumer]
            self.ready.add((consumer, subscription.incarnation))
            self.driver.call(client, ask.Ready(consumer, subscription.incarnation))
            self.hear()

    @rule(consumer=st.sampled_from(CONSUMERS), how=st.sampled_from(["lost", "dropped", "left"]))
    def go(self, consumer: ConsumerId, how: str) -> None:
        if consumer not in self.members:
            return
        client, subscription = self.members[consumer]
        if how == "lost":
            self.driver.lose(client)
        elif how == "dropped":
            drop = ask.Drop(consumer, subscription.incarnation, "injected")
            self.driver.call(self.producers[0], drop)
        else:
            self.driver.call(client, ask.Leave())
        self.hear()
        left = {each for each in self.members if each.replica == consumer.replica}
        assert consumer not in left and not (left and how != "left")  # a replica falls as one

    @rule(replicas=st.sets(st.sampled_from((0, 1, 2)), min_size=1), really=st.integers(0, 4))
    def change(self, replicas: set[int], really: int) -> None:
        """Some join, or leave, whatever is going on; who leaves is fenced, and nobody else."""
        if really:
            return
        stays = {each for each in self.members if each.replica in replicas}
        self.replicas = replicas
        self.driver.call(self.producers[0], ask.SetReplicas(tuple(sorted(replicas))))
        self.hear()
        assert self.members.keys() == stays

    # ---- epochs ----------------------------------------------------------------------------------

    @rule(rank=st.sampled_from((0, 1)))
    def begin(self, rank: int) -> None:
        if rank not in self.begins:
            request = ask.Begin(rank, self.begun[rank] + 1)
            self.begins[rank] = self.driver.start(self.producers[rank], request)
            self.hear()

    @precondition(lambda self: self.last)
    @rule(consumer=st.sampled_from(CONSUMERS))
    def commit(self, consumer: ConsumerId) -> None:
        if consumer not in self.members:
            return
        client, subscription = self.members[consumer]
        live = (consumer, subscription.incarnation)
        if live not in self.asked:
            call = self.driver.start(client, commit(subscription, self.last))
            self.asked[live] = (self.last, call)
            self.hear()

    @precondition(lambda self: self.fenced and self.last)
    @rule(data=st.data())
    def wake_late(self, data: st.DataObject) -> None:
        """A fenced incarnation is refused, whatever it asks for."""
        subscription = data.draw(st.sampled_from(self.fenced))
        live = (subscription.consumer, subscription.incarnation)
        client = self.driver.connect()
        requests = [subscribe(subscription), ask.Ready(*live)]
        epochs = [e for e in range(1, self.last + 1) if (live, e) not in self.granted]
        for request in requests + [commit(subscription, epoch) for epoch in epochs]:
            try:
                self.driver.call(client, request)
            except TornError:
                continue
            except RendezvousError:  # a new incarnation has its place
                assert not isinstance(request, ask.Commit)
                continue
            raise AssertionError(f"{request} was granted to a fenced incarnation")
        self.driver.lose(client)
        self.hear()

    @precondition(lambda self: self.last)
    @rule(really=st.integers(0, 3))
    def fail(self, really: int) -> None:
        if not really:
            epoch, was_open = self.last, not self.may_open()
            self.driver.call(self.producers[1], ask.Fail(epoch, "injected"))
            self.hear()
            assert epoch in self.failed or not was_open

    # ---- what it may and must do -----------------------------------------------------------------

    @property
    def last(self) -> int:
        return len(self.records)

    def hear(self) -> None:
        """Take in what was pushed and answered since the last step."""
        events = self.driver.events[self.watcher][self.num_heard :]
        self.num_heard += len(events)
        fallen: list[tuple[Live, Subscription]] = []
        for event in events:
            if isinstance(event, ConsumerDropped | ConsumerLeft):
                _, subscription = self.members.pop(event.consumer)
                assert subscription.incarnation == event.incarnation
                fallen.append(((event.consumer, event.incarnation), subscription))
            elif isinstance(event, EpochFailed):
                self.failed.add(event.epoch)
        fenced = {live for live, _ in fallen}
        self.fenced += [subscription for _, subscription in fallen]
        self.hear_commits(fenced)
        self.hear_begins()

    def hear_commits(self, fenced: set[Live]) -> None:
        granted = set()
        for live, (epoch, call) in list(self.asked.items()):
            outcome = self.driver.outcomes.get(call, self)
            if outcome is self:
                if live in fenced:
                    del self.asked[live]
                continue
            del self.asked[live]
            if outcome is None:
                granted.add((live, epoch))
            else:
                assert isinstance(outcome, TornError)
        for live, epoch in granted - self.granted:
            record = self.records[epoch].live
            mates = [each for each in record if each[0].replica == live[0].replica]
            assert live in mates and epoch == self.last and epoch not in self.failed
            assert live not in fenced and all((mate, epoch) in granted for mate in mates)
        self.granted |= granted

    def hear_begins(self) -> None:
        for rank, call in list(self.begins.items()):
            outcome = self.driver.outcomes.get(call)
            if outcome is None:
                continue
            del self.begins[rank]
            self.begun[rank] += 1
            epoch = self.begun[rank]
            if isinstance(outcome, EpochFailedError):
                assert epoch in self.failed
                continue
            assert isinstance(outcome, EpochRecord) and outcome.epoch == epoch
            if epoch not in self.records:
                assert self.last == epoch - 1 and self.may_open()
                assert set(outcome.live) == set(self.whole_replicas())
                self.records[epoch] = outcome
            assert outcome == self.records[epoch]  # frozen: the same for every rank

    def whole_replicas(self) -> Iterator[Live]:
        """The workers of replicas of which every worker is ready."""
        for replica, size in enumerate(SIZES):
            here = [
                (consumer, subscription.incarnation)
                for consumer, (_, subscription) in self.members.items()
                if consumer.replica == replica
            ]
            if len(here) == size and self.ready.issuperset(here):
                yield from here

    def may_open(self) -> bool:
        """Every live consumer of the last epoch committed it, or it failed, or it is over."""
        if not self.last or self.last in self.failed:
            return True
        alive = {(c, subscription.incarnation) for c, (_, subscription) in self.members.items()}
        waits = [live for live in self.records[self.last].live if live in alive]
        return all((live, self.last) in self.granted for live in waits)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if not hasattr(self, "driver"):
            return
        replicas = {live[0].replica for live in self.asked}
        for replica in replicas if self.last not in self.failed else ():
            mates = [each for each in self.records[self.last].live if each[0].replica == replica]
            asked = [each for each in mates if self.asked.get(each, (0, 0))[0] == self.last]
            assert not mates or asked != mates
        all_have_begun = all(epoch >= self.last for epoch in self.begun.values())
        begun = not self.last or self.last in self.failed or all_have_begun
        if begun and self.may_open() and list(self.whole_replicas()):
            assert 0 not in self.begins  # rank 0 opens it
        assert all(self.begun[rank] >= self.last for rank in self.begins)


NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # it takes minutes
TestRendezvousMachine = RendezvousMachine.TestCase
TestRendezvousMachine.settings = settings(
    max_examples=num_examples(150), stateful_step_count=50, phases=NO_SHRINKING
)


# ---- without any one of the rules something goes wrong, and is seen ------------------------------


def alone(ledger: EpochLedger, consumer: ConsumerId, incarnation: str, epoch: int) -> list[Live]:
    """A worker commits without the others of its replica."""
    return [(consumer, incarnation)]


def fenced_too(ledger: EpochLedger, consumer: ConsumerId, incarnation: str, epoch: int) -> list:
    """Whoever was in the record may commit, whatever became of it."""
    return [each for each in ledger._replicas[consumer.replica] if each[0] == consumer]


def half_replicas(roster: Roster) -> tuple[Live, ...]:
    """Whoever is ready takes part, whether or not the others of its replica are."""
    return tuple((c, m.incarnation) for c, m in sorted(roster.members.items()) if m.ready)


def joins_only(roster: Roster, replicas: Iterable[int]) -> list[ConsumerId]:
    """Whoever is there already may stay."""
    roster.replicas = frozenset(replicas)
    return []


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (EpochLedger, "replica_of", alone),
        (EpochLedger, "replica_of", fenced_too),
        (EpochLedger, "is_open", False),
        (EpochLedger, "next_waits_for", lambda *_: None),
        (EpochLedger, "drop", lambda *_: None),
        (EpochLedger, "fail", lambda *_: None),
        (Roster, "ready_consumers", half_replicas),
        (Roster, "replica_of", lambda _, consumer: [consumer]),
        (Roster, "set_replicas", joins_only),
    ],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: object
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    effort = settings(
        max_examples=900, stateful_step_count=50, phases=[Phase.generate], derandomize=True
    )
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(RendezvousMachine, settings=effort)
