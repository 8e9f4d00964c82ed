"""Leases: silence ends a client, and only its own."""

import math

import pytest

from rdt_transport.rendezvous import (
    ConsumerDropped,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.testing.state_driver import LEASE_SECONDS, StateDriver


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


def test_silent_client_is_lost_when_its_lease_ends(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    driver.sleep(LEASE_SECONDS - 1, alive=(client,))
    assert driver.call(client, ask.ListSubscriptions()) == (subscription.consumer,)

    driver.sleep(1.0, alive=(client,))

    assert driver.disconnected == [worker]
    assert driver.events[client][-1] == ConsumerDropped(
        subscription.consumer,
        subscription.incarnation,
        "consumer r0w0 is lost: its lease of 15 s ended without a heartbeat",
    )
    effects = driver.state.request(worker, 99, ask.ListSubscriptions(), 1.0, driver.now)
    assert effects == []  # the connection is about to be closed


def test_stall_of_the_server_is_not_the_clients(driver: StateDriver) -> None:
    client, _ = driver.producer(0)

    driver.state.stalled(2 * LEASE_SECONDS)
    driver.sleep(2 * LEASE_SECONDS)

    assert driver.disconnected == []
    assert driver.state.next_deadline() == pytest.approx(driver.now + LEASE_SECONDS)
    driver.sleep(LEASE_SECONDS)
    assert driver.disconnected == [client]


def test_calls_of_a_lost_client_are_forgotten(driver: StateDriver) -> None:
    client = driver.connect()
    call = driver.start(client, ask.GetJob())

    driver.lose(client)
    driver.producer(0)

    assert call not in driver.outcomes


def test_nothing_pending_has_no_deadline() -> None:
    driver = StateDriver()
    assert driver.state.next_deadline() == math.inf

    client = driver.connect()
    driver.start(client, ask.GetJob(), 2.0)

    assert driver.state.next_deadline() == driver.now + 2.0
