"""The replicas of a job: which it has, and what becomes of the others."""

import pytest

from rdt_plan import ConsumerId
from rdt_transport.errors import DisagreementError, TornError
from rdt_transport.rendezvous import ConsumerDropped, DroppedReplica, EpochOutcome
from rdt_transport.rendezvous import requests as ask
from rdt_transport.testing.job_records import make_subscription
from rdt_transport.testing.state_driver import StateDriver, commit, subscribe

REMOVED = "its replica is none of the job's any more"


@pytest.fixture
def driver() -> StateDriver:
    """Two ranks, the clients 1 and 2; a job that starts with replica 0."""
    driver = StateDriver(num_producers=2, num_replicas=1)
    driver.producer(0)
    driver.producer(1)
    return driver


def begin(driver: StateDriver, epoch: int) -> tuple[ConsumerId, ...]:
    """Both ranks begin; who is live."""
    records = [driver.call(rank + 1, ask.Begin(rank, epoch)) for rank in range(2)]
    assert records[0] == records[1]
    return tuple(consumer for consumer, _ in records[0].live)


def outcome(driver: StateDriver, epoch: int) -> EpochOutcome:
    calls = [driver.start(rank + 1, ask.AwaitClose(rank, epoch)) for rank in range(2)]
    first, second = map(driver.end, calls)
    assert first == second
    return first


def test_a_replica_joins_between_epochs_and_only_then(driver: StateDriver) -> None:
    old, a = driver.consumer(0, 0)
    stranger = make_subscription(1, 0)
    with pytest.raises(DisagreementError, match="r1w0 is of no replica of the job"):
        driver.call(driver.connect(), subscribe(stranger))

    assert begin(driver, 1) == (a.consumer,)
    driver.call(1, ask.SetReplicas((0, 1)))
    new, b = driver.consumer(1, 0)  # while the first epoch is open
    with pytest.raises(TornError, match="not live in epoch 1"):
        driver.call(new, commit(b, 1))
    driver.call(old, commit(a, 1))
    assert outcome(driver, 1) == EpochOutcome(1, (0,), ())  # it was none of this epoch's replicas

    assert begin(driver, 2) == (a.consumer, b.consumer)
    driver.call(old, commit(a, 2))
    driver.call(new, commit(b, 2))
    assert outcome(driver, 2) == EpochOutcome(2, (0, 1), ())


def test_a_replica_that_never_came_is_named_until_it_is_removed(driver: StateDriver) -> None:
    old, a = driver.consumer(0, 0)
    for epoch, replicas, absent in ((1, (0, 1), (1,)), (2, (0,), ())):
        driver.call(1, ask.SetReplicas(replicas))
        begin(driver, epoch)
        driver.call(old, commit(a, epoch))
        reason = "it took no part: it is not attached"
        dropped = tuple(DroppedReplica(each, reason) for each in absent)
        assert outcome(driver, epoch) == EpochOutcome(epoch, (0,), dropped)


def test_a_removed_replica_is_gone_from_the_next_epoch(driver: StateDriver) -> None:
    driver.call(1, ask.SetReplicas((0, 1)))
    first, a = driver.consumer(0, 0)
    second, b = driver.consumer(1, 0)
    begin(driver, 1)
    driver.call(first, commit(a, 1))
    driver.call(second, commit(b, 1))
    outcome(driver, 1)

    driver.call(1, ask.SetReplicas((1,)))

    assert driver.events[2][-1] == ConsumerDropped(a.consumer, a.incarnation, REMOVED)
    with pytest.raises(TornError, match=REMOVED):
        driver.call(first, ask.Ready(a.consumer, a.incarnation))
    assert begin(driver, 2) == (b.consumer,)
    driver.call(second, commit(b, 2))
    assert outcome(driver, 2) == EpochOutcome(2, (1,), ())


def test_a_replica_removed_from_an_open_epoch_is_dropped_from_it(driver: StateDriver) -> None:
    driver.call(1, ask.SetReplicas((0, 1)))
    first, a = driver.consumer(0, 0)
    second, b = driver.consumer(1, 0)
    begin(driver, 1)
    driver.call(first, commit(a, 1))  # a commit, too, as long as nobody was told

    driver.call(2, ask.SetReplicas((1,)))

    driver.call(second, commit(b, 1))
    assert outcome(driver, 1) == EpochOutcome(1, (1,), (DroppedReplica(0, REMOVED),))


def test_removing_the_last_live_replica_fails_the_open_epoch(driver: StateDriver) -> None:
    driver.consumer(0, 0)
    begin(driver, 1)
    driver.call(1, ask.SetReplicas(()))
    failed = driver.events[2][-1]
    assert failed.epoch == 1
    assert failed.reason == f"no replica is left: replica 0: {REMOVED}"


def test_a_number_that_returns_has_no_past(driver: StateDriver) -> None:
    old, a = driver.consumer(0, 0)
    driver.call(1, ask.SetReplicas((0, 1)))
    driver.consumer(1, 0)
    driver.call(1, ask.SetReplicas((0,)))
    driver.call(1, ask.SetReplicas((0, 1)))
    begin(driver, 1)
    driver.call(old, commit(a, 1))
    absent = DroppedReplica(1, "it took no part: it is not attached")
    assert outcome(driver, 1) == EpochOutcome(1, (0,), (absent,))


def test_the_replicas_outlive_a_producer(driver: StateDriver) -> None:
    driver.call(1, ask.SetReplicas((0, 5)))
    driver.lose(2)
    driver.producer(1)  # a new session
    _, b = driver.consumer(5, 0)
    assert driver.call(1, ask.Begin(0, 1)).live == ((b.consumer, b.incarnation),)
