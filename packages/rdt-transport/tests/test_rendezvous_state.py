"""The rendezvous' state machine under random requests, losses and time."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rdt_plan import ConsumerId
from rdt_plan.records import EpochRecord, ProducerRecord, Subscription
from rdt_transport.errors import EpochFailedError
from rdt_transport.rendezvous import (
    ConsumerDropped,
    ConsumerLeft,
    EpochFailed,
    SessionChanged,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.testing.job_records import make_producer, make_subscription
from rdt_transport.testing.state_driver import LEASE_SECONDS, StateDriver, commit, subscribe

NUM_PRODUCERS = 2
REPLICA_SIZES = (2, 1)
CONSUMERS = [ConsumerId(r, w) for r, size in enumerate(REPLICA_SIZES) for w in range(size)]
PRODUCERS = list(range(NUM_PRODUCERS))
TIMEOUT_SECONDS = 4.0


class Oracle(StateDriver):
    """Believes only what clients can see, and checks each effect against it."""

    def __init__(self) -> None:
        super().__init__(num_producers=NUM_PRODUCERS, num_replicas=len(REPLICA_SIZES))
        self.open_clients: set[int] = set()
        self.witness = self.connect()  # sees every push but subscriptions
        self.pending: dict[int, tuple[int, ask.Request, float]] = {}
        self.session: str | None = None
        self.records: dict[tuple[str, int], EpochRecord] = {}
        self.knowing: dict[tuple[str, int], set[int]] = {}  # ranks that begun it
        self.failed: set[tuple[str, int]] = set()
        self.over: set[str] = set()  # incarnations that were dropped or left
        self.committed: set[tuple[str, int, str]] = set()
        self.last: dict[str, int] = {}

    def connect(self) -> int:
        client = super().connect()
        self.open_clients.add(client)
        return client

    def start(self, client: int, request: ask.Request, timeout_seconds: float = 0.0) -> int:
        call = next(self._calls)
        self.pending[call] = (client, request, self.now + TIMEOUT_SECONDS)
        self.keep(self.state.request(client, call, request, TIMEOUT_SECONDS, self.now))
        return call

    def keep(self, effects: list[Effect]) -> None:
        answered = [effect.request for effect in effects if isinstance(effect, Answer)]
        self.grant([request for request in answered if isinstance(request, ask.Commit)])
        for effect in effects:
            assert effect.client in self.open_clients
            match effect:
                case Answer(_, call, request, value):
                    assert self.pending.pop(call)[1] is request
                    if isinstance(request, ask.Begin):
                        self.begun(request, value)
                case Refusal(_, call, error):
                    _, request, _ = self.pending.pop(call)
                    if isinstance(request, ask.Begin) and isinstance(error, EpochFailedError):
                        assert (self.session, request.epoch) in self.failed
                case Push(client, event):
                    if client == self.witness:
                        self.seen(event)
                case Disconnect(client, _):
                    self.open_clients.discard(client)

    def seen(self, event: Any) -> None:
        match event:
            case ConsumerDropped(_, incarnation, _) | ConsumerLeft(_, incarnation):
                assert incarnation not in self.over
                self.over.add(incarnation)
            case EpochFailed(epoch, _):
                assert self.session is not None
                assert epoch == self.last[self.session]
                assert (self.session, epoch) not in self.failed
                self.failed.add((self.session, epoch))
            case SessionChanged(session):
                assert session not in self.last

    def begun(self, request: ask.Begin, record: EpochRecord) -> None:
        assert record.epoch == request.epoch
        key = (record.session, record.epoch)
        self.knowing.setdefault(key, set()).add(request.rank)
        if key in self.records:
            assert record == self.records[key]  # frozen: the same for every rank, for ever
            return
        self.session = record.session
        assert record.epoch == self.last.get(record.session, 0) + 1
        before = self.records.get((record.session, record.epoch - 1))
        if before is not None:
            self.closed(before)
        live = dict(record.live)
        assert live
        assert self.over.isdisjoint(live.values())
        for consumer in live:
            size = REPLICA_SIZES[consumer.replica]
            assert all(ConsumerId(consumer.replica, w) in live for w in range(size))
        self.records[key] = record
        self.last[record.session] = record.epoch

    def closed(self, record: EpochRecord) -> None:
        if (record.session, record.epoch) in self.failed:
            return
        assert self.knowing[record.session, record.epoch] == set(PRODUCERS)
        for _, incarnation in record.live:
            key = (record.session, record.epoch, incarnation)
            assert key in self.committed or incarnation in self.over

    def grant(self, granted: list[ask.Commit]) -> None:
        """A replica commits as one: none of it fallen, none of it missing."""
        assert self.session is not None or not granted
        for request in granted:
            assert self.session is not None
            key = (self.session, request.epoch, request.incarnation)
            record = self.records[self.session, request.epoch]
            assert (request.consumer, request.incarnation) in record.live
            if key in self.committed:
                continue
            assert (self.session, request.epoch) not in self.failed
            for other, incarnation in record.live:
                if other.replica == request.consumer.replica:
                    assert incarnation not in self.over
                    assert any(g.incarnation == incarnation for g in granted)
        for request in granted:
            assert self.session is not None
            self.committed.add((self.session, request.epoch, request.incarnation))


class RendezvousMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Oracle()
        self.producers: dict[int, tuple[int, ProducerRecord]] = {}
        self.consumers: dict[ConsumerId, tuple[int, Subscription]] = {}
        self.ever: list[Subscription] = []

    def client_of(self, holder: dict[Any, tuple[int, Any]], key: Any) -> int | None:
        client, _ = holder.get(key, (None, None))
        return client if client in self.driver.open_clients else None

    def disconnect(self, client: int) -> None:
        self.driver.open_clients.discard(client)
        self.driver.lose(client)
        self.forget_the_gone()

    def forget_the_gone(self) -> None:
        driver = self.driver
        pending = driver.pending.items()
        driver.pending = {call: it for call, it in pending if it[0] in driver.open_clients}

    @initialize()
    def assemble(self) -> None:
        self.heal()

    @rule()
    def heal(self) -> None:
        """Everybody who is missing comes back, as a new incarnation."""
        for rank in PRODUCERS:
            if self.client_of(self.producers, rank) is None:
                self.publish(rank, again=False)
        for consumer in CONSUMERS:
            _, subscription = self.consumers.get(consumer, (0, None))
            client = self.client_of(self.consumers, consumer)
            if (
                subscription is None
                or client is None
                or subscription.incarnation in self.driver.over
            ):
                self.subscribe(consumer, ready=True)

    @rule(rank=st.sampled_from(PRODUCERS), again=st.booleans())
    def publish(self, rank: int, again: bool) -> None:
        client = self.client_of(self.producers, rank)
        if client is None or not again:
            fresh, record = self.driver.connect(), make_producer(rank)
            if client is None:
                self.producers[rank] = (fresh, record)
            self.driver.start(fresh, ask.Publish(record, b"manifest"))
        else:
            self.driver.start(client, ask.Publish(self.producers[rank][1], b"manifest"))

    @rule(consumer=st.sampled_from(CONSUMERS), ready=st.booleans())
    def subscribe(self, consumer: ConsumerId, ready: bool) -> None:
        client = self.client_of(self.consumers, consumer) or self.driver.connect()
        fresh = make_subscription(
            consumer.replica,
            consumer.worker,
            num_workers=REPLICA_SIZES[consumer.replica],
            owners=tuple(PRODUCERS),
        )
        self.driver.start(client, subscribe(fresh))
        listed = self.driver.start(client, ask.GetSubscription(consumer))
        assert listed not in self.driver.pending
        self.ever.append(fresh)
        self.consumers[consumer] = (client, fresh)
        if ready:
            self.driver.start(client, ask.Ready(consumer, fresh.incarnation))

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def subscribe_again(self, data: st.DataObject) -> None:
        """With any incarnation there ever was."""
        old = data.draw(st.sampled_from(self.ever))
        client = self.client_of(self.consumers, old.consumer) or self.driver.connect()
        self.driver.start(client, subscribe(old))
        self.consumers[old.consumer] = (client, old)

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(self.ever))
        self.driver.start(self.driver.witness, ask.Ready(which.consumer, which.incarnation))

    @rule(rank=st.sampled_from(PRODUCERS), ahead=st.integers(0, 2))
    def begin(self, rank: int, ahead: int) -> None:
        client = self.client_of(self.producers, rank)
        last = self.driver.last.get(self.driver.session or "", 0)
        self.driver.start(client or self.driver.witness, ask.Begin(rank, last + ahead))

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), behind=st.integers(0, 1))
    def commit(self, data: st.DataObject, behind: int) -> None:
        which = data.draw(st.sampled_from(self.ever))
        client = self.client_of(self.consumers, which.consumer)
        last = self.driver.last.get(self.driver.session or "", 0)
        self.driver.start(client or self.driver.witness, commit(which, last - behind))

    @precondition(lambda self: self.driver.session in self.driver.last)
    @rule()
    def commit_all(self) -> None:
        """What happens when nothing goes wrong."""
        last = self.driver.last.get(self.driver.session or "", 0)
        for client, subscription in self.consumers.values():
            if client in self.driver.open_clients:
                self.driver.start(client, commit(subscription, last))

    @rule(first=st.sampled_from(PRODUCERS), committed_first=st.booleans())
    def sync(self, first: int, committed_first: bool) -> None:
        """A whole epoch; the second rank may come late."""
        self.heal()
        self.begin(first, ahead=1)
        last = self.driver.last.get(self.driver.session or "", 0)
        if committed_first:
            self.commit_all()
        client = self.client_of(self.producers, 1 - first)
        self.driver.start(client or self.driver.witness, ask.Begin(1 - first, last))
        if not committed_first:
            self.commit_all()

    @rule(behind=st.integers(0, 1))
    def fail(self, behind: int) -> None:
        last = self.driver.last.get(self.driver.session or "", 0)
        self.driver.start(self.driver.witness, ask.Fail(last - behind, "drawn"))

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(self.ever))
        self.driver.start(self.driver.witness, ask.Drop(which.consumer, which.incarnation, "drawn"))

    @rule(who=st.sampled_from([*CONSUMERS, *PRODUCERS]), goodbye=st.booleans())
    def go(self, who: ConsumerId | int, goodbye: bool) -> None:
        holder: Any = self.producers if isinstance(who, int) else self.consumers
        client = self.client_of(holder, who)
        if client is not None:
            if goodbye:
                self.driver.start(client, ask.Leave())
            self.disconnect(client)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_SECONDS, LEASE_SECONDS]), silent=st.booleans())
    def pass_time(self, seconds: float, silent: bool) -> None:
        speaking = self.driver.open_clients - {c for c, _ in self.consumers.values()}
        self.driver.sleep(seconds, alive=tuple(speaking if silent else self.driver.open_clients))
        self.forget_the_gone()

    @invariant()
    def nothing_is_left_that_could_be_answered(self) -> None:
        assert self.driver.state.tick(self.driver.now) == []

    @invariant()
    def no_deadline_passes(self) -> None:
        assert all(ends > self.driver.now for _, _, ends in self.driver.pending.values())
        assert self.driver.state.next_deadline() > self.driver.now


RendezvousMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestRendezvous = RendezvousMachine.TestCase
