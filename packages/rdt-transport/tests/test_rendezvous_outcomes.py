"""How an epoch ended, told to every rank alike: who has its weights, who has not, and why."""

import pytest

from rdt_transport.errors import EpochFailedError, RendezvousTimeoutError
from rdt_transport.rendezvous import DroppedReplica, EpochFailed, EpochOutcome
from rdt_transport.rendezvous import requests as ask
from rdt_transport.testing.state_driver import StateDriver, commit


@pytest.fixture
def driver() -> StateDriver:
    """Two ranks, the clients 1 and 2; two replicas, of one and of two workers."""
    driver = StateDriver(num_producers=2)
    driver.producer(0)
    driver.producer(1)
    return driver


def begin(driver: StateDriver, epoch: int = 1) -> None:
    for rank in range(2):
        driver.call(rank + 1, ask.Begin(rank, epoch))


def awaited(driver: StateDriver, epoch: int = 1) -> list[int]:
    return [driver.start(rank + 1, ask.AwaitClose(rank, epoch)) for rank in range(2)]


def test_one_replica_commits_and_the_other_fell(driver: StateDriver) -> None:
    small, a = driver.consumer(0, 0)
    _, b = driver.consumer(1, 0, num_workers=2)
    lost, _ = driver.consumer(1, 1, num_workers=2)
    begin(driver)
    calls = awaited(driver)
    driver.lose(lost)
    driver.call(1, ask.Drop(b.consumer, b.incarnation, "HTTP 500"))  # too late to be the reason
    assert not driver.outcomes.keys() & set(calls)

    driver.call(small, commit(a, 1))

    reason = "consumer r1w1 is lost: its connection closed"
    outcome = EpochOutcome(1, (0,), (DroppedReplica(1, reason),))
    assert [driver.end(call) for call in calls] == [outcome, outcome]

    driver.call(1, ask.Begin(0, 2))
    driver.call(2, ask.Begin(1, 2))
    calls = awaited(driver, 2)
    driver.call(small, commit(a, 2))
    absent = EpochOutcome(2, (0,), (DroppedReplica(1, f"it took no part: {reason}"),))
    assert [driver.end(call) for call in calls] == [absent, absent]


def test_losing_every_replica_fails_with_every_reason(driver: StateDriver) -> None:
    _, a = driver.consumer(0, 0)
    _, b = driver.consumer(1, 0)
    begin(driver)
    calls = awaited(driver)

    driver.call(1, ask.Drop(a.consumer, a.incarnation, "HTTP 500", 1))
    driver.call(1, ask.Drop(b.consumer, b.incarnation, "no answer", 1))

    for call in calls:
        with pytest.raises(
            EpochFailedError, match=r"no replica is left: replica 0: .*HTTP 500; re"
        ):
            driver.end(call)
    (failed,) = [event for event in driver.events[2] if isinstance(event, EpochFailed)]
    assert "replica 1: r1w0: no answer" in failed.reason


def test_no_rank_is_told_before_all_ask_and_until_then_each_may_fail_it(
    driver: StateDriver,
) -> None:
    worker, a = driver.consumer(0, 0)
    begin(driver)
    driver.call(worker, commit(a, 1))
    early = driver.start(1, ask.AwaitClose(0, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="producer 1 is not through epoch 1"):
        driver.end(early)
    early = driver.start(1, ask.AwaitClose(0, 1))

    driver.call(2, ask.Fail(1, "a tensor was changed"))

    with pytest.raises(EpochFailedError, match="a tensor was changed"):
        driver.end(early)
    assert driver.call(1, ask.Begin(0, 2)).live == ((a.consumer, a.incarnation),)


def test_a_rank_that_was_refused_at_its_deadline_asks_no_more(driver: StateDriver) -> None:
    """It gives the epoch up: until then no other rank may be told of a success."""
    worker, a = driver.consumer(0, 0)
    begin(driver)
    driver.call(worker, commit(a, 1))
    refused = driver.start(1, ask.AwaitClose(0, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="producer 1 is not through epoch 1"):
        driver.end(refused)

    late = driver.start(2, ask.AwaitClose(1, 1))
    assert late not in driver.outcomes
    driver.call(1, ask.Fail(1, "trainer rank 0: waited 1 s"))

    with pytest.raises(EpochFailedError, match="trainer rank 0: waited 1 s"):
        driver.end(late)


def test_a_rank_that_is_lost_before_the_end_is_told_fails_it(driver: StateDriver) -> None:
    worker, a = driver.consumer(0, 0)
    begin(driver)
    driver.call(worker, commit(a, 1))
    waiting = driver.start(1, ask.AwaitClose(0, 1))

    driver.lose(2)

    with pytest.raises(EpochFailedError, match="producer 1 is lost"):
        driver.end(waiting)


def test_a_replica_that_committed_may_be_dropped_until_the_end_is_told(
    driver: StateDriver,
) -> None:
    """Its workers have the weights, and its server answered the finish with an error."""
    one, a = driver.consumer(0, 0)
    other, b = driver.consumer(1, 0)
    begin(driver)
    driver.call(one, commit(a, 1))
    driver.call(other, commit(b, 1))

    driver.call(1, ask.Drop(b.consumer, b.incarnation, "HTTP 500", 1))

    calls = awaited(driver)
    assert [driver.end(c).committed for c in calls] == [(0,), (0,)]
    assert driver.end(calls[0]).dropped == (DroppedReplica(1, "r1w0: HTTP 500"),)


def test_a_replica_that_leaves_after_its_commit_has_committed(driver: StateDriver) -> None:
    one, a = driver.consumer(0, 0)
    other, b = driver.consumer(1, 0)
    begin(driver)
    for worker, subscription in ((one, a), (other, b)):
        driver.call(worker, commit(subscription, 1))
        driver.call(worker, ask.Leave())

    assert [driver.end(call).committed for call in awaited(driver)] == [(0, 1)] * 2


def test_who_failed_in_an_epoch_that_failed_anyway_is_not_fenced(driver: StateDriver) -> None:
    _, a = driver.consumer(0, 0)
    begin(driver)
    driver.call(2, ask.Fail(1, "the source raised"))

    driver.call(1, ask.Drop(a.consumer, a.incarnation, "HTTP 500: the source raised", 1))

    assert driver.call(1, ask.Begin(0, 2)).live == ((a.consumer, a.incarnation),)
