"""The real state machine of the rendezvous, in place of the simulator's, under whole fleets."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import ChunkTable, ConsumerId
from rdt_plan.simulate import Faults, Report, SimulatedRendezvous, simulate
from rdt_plan.testing import num_examples, small_fleet
from rdt_transport.errors import RdtTransportError, TornError
from rdt_transport.rendezvous import ConsumerDropped, EpochFailed
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.epochs import EpochLedger
from rdt_transport.rendezvous.events import Announced
from rdt_transport.rendezvous.sealed import SealedOffer
from rdt_transport.rendezvous.state import JobState
from rdt_transport.testing.job_records import make_offer, make_subscription
from rdt_transport.testing.state_driver import StateDriver, subscribe

NEVER_SECONDS = 1e6
PLANS, GROUPS = small_fleet()


class JobStateRendezvous(SimulatedRendezvous):
    """Speaks to `JobState`; what that pushes and answers is told in the parties' time."""

    def start(self) -> None:
        """Once, when the producers are known."""
        self.driver = StateDriver(num_producers=len(self.producers), num_replicas=3)
        self.published = {rank: self.driver.producer(rank) for rank in self.producers}
        self.parties: dict[int, Any] = {
            client: self.producers[rank] for rank, (client, _) in self.published.items()
        }
        self.subscriptions: dict[str, Any] = {}  # by name: client, subscription, tables
        self.names: dict[str, str] = {}  # by incarnation
        self.heard: dict[int, int] = {}
        self.waits: dict[int, tuple[Any, ...]] = {}
        self.arenas: dict[tuple[str, int], int] = {}

    def call(self, client: int, request: Any) -> None:
        """What is refused concerns a fallen party, or an epoch that is over."""
        try:
            self.driver.call(client, request)
        except RdtTransportError:
            pass
        self.hear()

    def wait(self, client: int, request: Any, *what: Any) -> None:
        self.waits[self.driver.start(client, request, NEVER_SECONDS)] = what
        self.hear()

    # ---- what the parties ask --------------------------------------------------------------------

    def subscribe(
        self, who: ConsumerId, party: Any, num_workers: int, tables: list[ChunkTable]
    ) -> None:
        if not hasattr(self, "driver"):
            self.start()
        if party.name in self.world.fenced:
            return
        made = make_subscription(who.replica, who.worker, num_workers=num_workers)
        subscription = replace(made, plan_digest=party.plan.digest, tables=tuple(tables))
        client = self.driver.connect()
        self.parties[client] = party
        self.names[subscription.incarnation] = party.name
        self.subscriptions[party.name] = (client, subscription)
        self.call(client, subscribe(subscription))
        offers = ask.GetOffers(who, subscription.incarnation)
        self.wait(client, offers, "offers", party)

    def offer(self, who: ConsumerId, incarnation: str, rank: int, arena: int) -> None:
        client, record = self.published[rank]
        self.arenas[incarnation, rank] = arena
        offer = make_offer(self.subscriptions[incarnation][1], record)
        self.call(client, ask.MakeOffers((SealedOffer.seal(offer),)))

    def ready(self, who: ConsumerId, incarnation: str) -> None:
        client, subscription = self.subscriptions[incarnation]
        self.call(client, ask.Ready(who, subscription.incarnation))

    def commit(self, who: ConsumerId, incarnation: str, epoch: int) -> None:
        client, subscription = self.subscriptions[incarnation]
        request = ask.Commit(who, subscription.incarnation, epoch)
        self.wait(client, request, "commit", who, incarnation, epoch)

    def begin(self, rank: int, epoch: int) -> None:
        if not hasattr(self, "driver"):
            self.start()
        client, _ = self.published[rank]
        self.wait(client, ask.Begin(rank, epoch), "begin", rank, epoch)

    def fail(self, epoch: int, reason: str) -> None:
        self.call(self.published[0][0], ask.Fail(epoch, reason))

    def drop(self, replica: int) -> None:
        for _, subscription in list(getattr(self, "subscriptions", {}).values()):
            if subscription.consumer.replica == replica:
                who, incarnation = subscription.consumer, subscription.incarnation
                self.call(self.published[0][0], ask.Drop(who, incarnation, "injected"))

    # ---- what it says ----------------------------------------------------------------------------

    def hear(self) -> None:
        for client, party in self.parties.items():
            events = self.driver.events[client]
            for event in events[self.heard.get(client, 0) :]:
                self.hear_event(party, event)
            self.heard[client] = len(events)
        for call, what in list(self.waits.items()):
            if call in self.driver.outcomes:
                del self.waits[call]
                self.hear_outcome(self.driver.outcomes[call], *what)

    def hear_event(self, party: Any, event: Any) -> None:
        match event:
            case Announced(sealed):
                incarnation, who = sealed.head.incarnation, sealed.head.consumer
                for table in self.subscriptions[self.names[incarnation]][1].tables:
                    if table.owner == party.rank:
                        name = self.names[incarnation]
                        self._tell(party, lambda t=table, n=name: party.subscribed(who, n, t))
            case ConsumerDropped(who, incarnation, _):
                name = self.names[incarnation]
                self._tell(party, lambda: party.dropped(who, name))
            case EpochFailed(epoch, reason):
                self.failures[epoch] = reason
                self._tell(party, lambda: party.failed(epoch))

    def hear_outcome(self, outcome: Any, kind: str, *what: Any) -> None:
        if kind == "offers" and not isinstance(outcome, Exception):
            [party] = what
            for offer in outcome:
                arena = self.arenas[party.name, offer.rank]
                self._tell(party, lambda r=offer.rank, a=arena: party.offered(r, a))
        elif kind == "commit" and outcome is None:
            who, name, epoch = what
            if name in self.world.fenced:
                self.world.violations.append(f"{name} was granted epoch {epoch} when fenced")
            self.commits[epoch].add(who)
        elif kind == "begin":
            rank, epoch = what
            if epoch not in self.records:
                self.open(epoch, {who: self.names[each] for who, each in outcome.live})
            producer, live = self.producers[rank], self.records[epoch]
            self._tell(producer, lambda: producer.begin(epoch, live))

    def open(self, epoch: int, live: dict[ConsumerId, str]) -> None:
        self.records[epoch] = live
        self.commits[epoch] = set()
        for name in live.values():
            party = self.parties[self.subscriptions[name][0]]
            self._tell(party, lambda p=party: p.started(epoch, live))


def run(seed: int, lookahead: int, num_epochs: int, faults: Faults) -> Report:
    return simulate(
        PLANS,
        GROUPS,
        lookahead=lookahead,
        seed=seed,
        num_epochs=num_epochs,
        faults=faults,
        rendezvous=JobStateRendezvous,
    )


@settings(max_examples=num_examples(60))
@given(
    st.integers(0, 2**32),
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), max_size=3),
    st.integers(0, 2),
    st.integers(0, 1),
)
def test_fleets_finish_or_quiesce_under_the_real_rendezvous(
    seed: int,
    lookahead: int,
    num_epochs: int,
    drops: list[int],
    num_aborts: int,
    num_read_failures: int,
) -> None:
    faults = Faults(
        drops=tuple(drops),
        rejoin=True,
        num_aborts=num_aborts,
        num_read_failures=num_read_failures,
        duplicate_rate=0.1,
    )
    report = run(seed, lookahead, num_epochs, faults)
    assert report.violations == ()
    assert len(report.commits) == num_epochs
    assert len(report.failures) <= len(drops) + num_aborts + num_read_failures


_commit = JobState._commit


def fenced_too(state: JobState, *live: Any) -> Any:
    """Whoever was dropped may commit all the same."""
    try:
        return _commit(state, *live)
    except TornError:
        return None


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "says"),
    [
        (EpochLedger, "is_open", False, "was never committed by"),
        (EpochLedger, "drop", lambda *_: None, "nothing can happen any more"),
        (JobState, "_commit", fenced_too, "was granted epoch"),
    ],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: object, says: str
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    faults = Faults(drops=(0, 1), rejoin=True)
    found = [each for seed in range(20) for each in run(seed, 1, 3, faults).violations]
    assert any(says in each for each in found), found
