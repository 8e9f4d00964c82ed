"""Drives the rendezvous' state machine by hand: time stands still until a test moves it."""

from itertools import count
from typing import Any

from rdt_plan.records import ProducerRecord, Subscription
from rdt_transport.rendezvous import JobSettings
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.effects import Answer, Disconnect, Effect, Push, Refusal
from rdt_transport.rendezvous.sealed import SealedSubscription
from rdt_transport.rendezvous.state import JobState
from rdt_transport.testing.job_records import incarnation, make_producer, make_subscription

__all__ = ["LEASE_SECONDS", "StateDriver", "commit", "subscribe"]

LEASE_SECONDS = 15.0


def commit(subscription: Subscription, epoch: int) -> ask.Commit:
    return ask.Commit(subscription.consumer, subscription.incarnation, epoch)


def subscribe(subscription: Subscription, session: str | None = None) -> ask.Subscribe:
    """The consumer's request."""
    return ask.Subscribe(SealedSubscription.seal(subscription), session)


class StateDriver:
    """Plays the server: numbers the calls, keeps the time, sorts the effects."""

    def __init__(self, *, num_producers: int = 1, num_replicas: int = 2) -> None:
        settings = JobSettings(num_producers, num_replicas, lease_seconds=LEASE_SECONDS)
        self.state = JobState("job", settings, incarnation)
        self.now = 100.0
        self.events: dict[int, list[Any]] = {}
        self.outcomes: dict[int, Any] = {}
        self.disconnected: list[int] = []
        self._clients = count(1)
        self._calls = count(1)

    def connect(self) -> int:
        client = next(self._clients)
        self.state.connected(client, self.now)
        self.events[client] = []
        return client

    def start(self, client: int, request: ask.Request, timeout_seconds: float = 5.0) -> int:
        call = next(self._calls)
        self.keep(self.state.request(client, call, request, timeout_seconds, self.now))
        return call

    def call(self, client: int, request: ask.Request) -> Any:
        """The outcome of a call that must end at once."""
        return self.end(self.start(client, request))

    def end(self, call: int) -> Any:
        outcome = self.outcomes[call]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def keep(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(_, call, _, value):
                    assert call not in self.outcomes
                    self.outcomes[call] = value
                case Refusal(_, call, error):
                    assert call not in self.outcomes
                    self.outcomes[call] = error
                case Push(client, event):
                    self.events[client].append(event)
                case Disconnect(client, _):
                    self.disconnected.append(client)

    def sleep(self, seconds: float, *, alive: tuple[int, ...] = ()) -> None:
        self.now += seconds
        for client in alive:
            self.state.heard(client, self.now)
        self.keep(self.state.tick(self.now))

    def lose(self, client: int) -> None:
        self.keep(self.state.lost(client, "its connection closed", self.now))

    # ---- whole steps -------------------------------------------------------------------------

    def producer(self, rank: int, **fields: Any) -> tuple[int, ProducerRecord]:
        client, record = self.connect(), make_producer(rank, **fields)
        self.call(client, ask.Publish(record, b"manifest"))
        return client, record

    def consumer(self, replica: int, worker: int, **fields: Any) -> tuple[int, Subscription]:
        client, subscription = self.connect(), make_subscription(replica, worker, **fields)
        self.call(client, subscribe(subscription))
        self.call(client, ask.Ready(subscription.consumer, subscription.incarnation))
        return client, subscription
