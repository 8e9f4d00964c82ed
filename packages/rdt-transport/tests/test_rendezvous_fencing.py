"""Dropping is a fence: whoever fell can never commit."""

import pytest

from rdt_transport.errors import (
    RendezvousTimeoutError,
    TornError,
)
from rdt_transport.rendezvous import (
    ConsumerDropped,
    ConsumerLeft,
    EpochFailed,
    ProducerLost,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.events import Announced
from rdt_transport.testing.job_records import make_subscription
from rdt_transport.testing.state_driver import StateDriver, commit, subscribe


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


def test_dropping_one_worker_drops_its_replica_and_fences_it(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    third, c = driver.consumer(1, 0)
    frozen = driver.call(client, ask.Begin(0, 1))
    pending = driver.start(first, commit(a, 1))

    driver.call(client, ask.Drop(b.consumer, b.incarnation, "too slow"))
    driver.call(client, ask.Drop(b.consumer, b.incarnation, "too slow"))  # nothing happens

    dropped = [ConsumerDropped(s.consumer, s.incarnation, "r0w1: too slow") for s in (a, b)]
    assert driver.events[third] == dropped
    assert driver.events[second] == dropped
    with pytest.raises(TornError, match="too slow"):
        driver.end(pending)
    with pytest.raises(TornError, match="too slow"):
        driver.call(second, commit(b, 1))
    with pytest.raises(TornError, match="subscribe again as a new one"):
        driver.call(second, subscribe(b))
    assert driver.call(client, ask.Begin(0, 1)) == frozen

    driver.call(third, commit(c, 1))

    assert driver.call(client, ask.Begin(0, 2)).live == ((c.consumer, c.incarnation),)


def test_new_incarnation_joins_at_the_next_begin(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    lost, _ = driver.consumer(0, 0)
    other, b = driver.consumer(1, 0)
    driver.call(client, ask.Begin(0, 1))
    driver.lose(lost)
    back, a = driver.consumer(0, 0)

    with pytest.raises(TornError, match="not live in epoch 1"):
        driver.call(back, commit(a, 1))

    driver.call(other, commit(b, 1))
    record = driver.call(client, ask.Begin(0, 2))

    assert record.live == ((a.consumer, a.incarnation), (b.consumer, b.incarnation))


def test_epoch_that_loses_every_consumer_has_failed(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, _ = driver.consumer(0, 0)
    second, _ = driver.consumer(1, 0)
    driver.call(client, ask.Begin(0, 1))
    driver.lose(first)
    assert not [e for e in driver.events[client] if isinstance(e, EpochFailed)]

    driver.lose(second)

    (failed,) = [e for e in driver.events[client] if isinstance(e, EpochFailed)]
    assert failed.epoch == 1
    assert "no replica is left: replica 0: consumer r0w0 is lost" in failed.reason
    assert "r1w0" in failed.reason


def test_epoch_survives_when_somebody_committed(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0)
    second, _ = driver.consumer(1, 0)
    driver.call(client, ask.Begin(0, 1))
    driver.call(first, commit(a, 1))

    driver.lose(second)

    assert not [e for e in driver.events[client] if isinstance(e, EpochFailed)]
    assert driver.call(client, ask.Begin(0, 2)).live == ((a.consumer, a.incarnation),)


def test_leaving_between_epochs_leaves_the_others(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.call(client, ask.Begin(0, 1))
    driver.start(first, commit(a, 1))
    driver.call(second, commit(b, 1))

    driver.call(first, ask.Leave())

    assert driver.events[second] == [ConsumerLeft(a.consumer, a.incarnation)]
    assert driver.call(second, ask.ListSubscriptions()) == (b.consumer,)


def test_leaving_within_an_epoch_drops_the_replica(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.consumer(1, 0)
    driver.call(client, ask.Begin(0, 1))
    pending = driver.start(second, commit(b, 1))

    driver.call(first, ask.Leave())

    assert driver.events[second] == [
        ConsumerLeft(a.consumer, a.incarnation),
        ConsumerDropped(b.consumer, b.incarnation, "consumer r0w0 left"),
    ]
    with pytest.raises(TornError, match="consumer r0w0 left"):
        driver.end(pending)


def test_one_client_may_hold_a_whole_replica(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker = driver.connect()
    for index in range(2):
        subscription = make_subscription(0, index, num_workers=2)
        driver.call(worker, subscribe(subscription))

    driver.lose(worker)

    assert driver.call(client, ask.ListSubscriptions()) == ()
    kinds = [type(event) for event in driver.events[client]]
    assert kinds == [Announced, Announced, ConsumerDropped, ConsumerDropped]


def test_lost_producer_fails_the_epoch_everywhere() -> None:
    driver = StateDriver(num_producers=2)
    first, _ = driver.producer(0)
    second, _ = driver.producer(1)
    worker, subscription = driver.consumer(0, 0)
    driver.call(first, ask.Begin(0, 1))

    driver.lose(second)

    failed, lost = driver.events[worker]
    assert isinstance(failed, EpochFailed)
    assert failed.epoch == 1
    assert "producer 1 is lost" in failed.reason
    assert lost == ProducerLost(1, failed.reason)
    with pytest.raises(TornError, match="producer 1 is lost"):
        driver.call(worker, commit(subscription, 1))
    late = driver.start(first, ask.Begin(0, 2), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="producer 1 has not published"):
        driver.end(late)
