"""Epochs: frozen records, commits, failures."""

import pytest

from rdt_transport.errors import (
    EpochFailedError,
    RendezvousError,
    RendezvousTimeoutError,
    TornError,
)
from rdt_transport.rendezvous import (
    DroppedReplica,
    EpochFailed,
    EpochOutcome,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.testing.job_records import make_subscription
from rdt_transport.testing.state_driver import StateDriver, commit, subscribe

ABSENT = "it took no part: it is not attached"


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


def test_begin_freezes_one_record_for_every_rank() -> None:
    driver = StateDriver(num_producers=2)
    first, _ = driver.producer(0)
    second, _ = driver.producer(1)
    one, a = driver.consumer(0, 0)
    record = driver.call(first, ask.Begin(0, 1))
    late, b = driver.consumer(1, 0)

    assert record.live == ((a.consumer, a.incarnation),)
    assert driver.call(first, ask.Begin(0, 1)) == record
    assert driver.call(one, ask.GetEpoch(None)) == record
    driver.call(one, commit(a, 1))
    assert driver.call(second, ask.Begin(1, 1)) == record  # closed already: still the same

    early = driver.start(second, ask.Begin(1, 2))
    assert early not in driver.outcomes  # rank 0 opens it, once its servers are there
    record = driver.call(first, ask.Begin(0, 2))

    assert driver.end(early) == record
    assert record.live == ((a.consumer, a.incarnation), (b.consumer, b.incarnation))
    with pytest.raises(RendezvousError, match="epoch 1 is over; the last epoch is 2"):
        driver.call(late, ask.GetEpoch(1))


def test_begin_waits_for_a_whole_ready_replica(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    call = driver.start(client, ask.Begin(0, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="no consumer has subscribed"):
        driver.end(call)

    driver.consumer(0, 0, num_workers=2)
    call = driver.start(client, ask.Begin(0, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="consumer r0w1 has not subscribed"):
        driver.end(call)

    worker, other = driver.connect(), make_subscription(0, 1, num_workers=2)
    driver.call(worker, subscribe(other))
    call = driver.start(client, ask.Begin(0, 1), 1.0)
    driver.sleep(0.9)
    assert call not in driver.outcomes

    driver.call(worker, ask.Ready(other.consumer, other.incarnation))

    assert len(driver.end(call).live) == 2


def test_begin_waits_for_the_epoch_before(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.call(client, ask.Begin(0, 1))
    granted = driver.start(first, commit(a, 1))
    late = driver.start(client, ask.Begin(0, 2), 1.0)
    driver.sleep(1.0)
    with pytest.raises(
        RendezvousTimeoutError, match="consumers r0w0, r0w1 have not committed epoch 1"
    ):
        driver.end(late)
    waiting = driver.start(client, ask.Begin(0, 2))
    assert granted not in driver.outcomes

    driver.call(second, commit(b, 1))

    assert driver.end(granted) is None
    assert driver.end(waiting).epoch == 2


def test_commit_is_granted_to_all_though_the_next_epoch_opens_in_between(
    driver: StateDriver,
) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.call(client, ask.Begin(0, 1))
    waiting = driver.start(client, ask.Begin(0, 2))  # before the first worker asks
    granted = driver.start(first, commit(a, 1))

    driver.call(second, commit(b, 1))

    assert driver.end(waiting).epoch == 2
    assert driver.end(granted) is None


def test_next_epoch_waits_for_the_rank_that_comes_late() -> None:
    """A rank that nobody reads from may come after everybody has committed."""
    driver = StateDriver(num_producers=2)
    first, _ = driver.producer(0)
    second, _ = driver.producer(1)
    worker, subscription = driver.consumer(0, 0)
    record = driver.call(first, ask.Begin(0, 1))
    driver.call(worker, commit(subscription, 1))
    late = driver.start(first, ask.Begin(0, 2), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="producer 1 has not begun epoch 1"):
        driver.end(late)
    waiting = driver.start(first, ask.Begin(0, 2))

    assert driver.call(second, ask.Begin(1, 1)) == record

    assert driver.end(waiting).epoch == 2


def test_end_of_an_epoch_can_be_awaited(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    early = driver.start(client, ask.AwaitClose(0, 1))
    driver.call(client, ask.Begin(0, 1))
    late = driver.start(client, ask.AwaitClose(0, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="consumer r0w0 has not committed epoch 1"):
        driver.end(late)

    driver.call(worker, commit(subscription, 1))

    assert driver.end(early) == EpochOutcome(1, (0,), (DroppedReplica(1, ABSENT),))
    driver.call(client, ask.Begin(0, 2))
    with pytest.raises(RendezvousError, match="epoch 1 is over"):
        driver.call(client, ask.AwaitClose(0, 1))
    waiting = driver.start(client, ask.AwaitClose(0, 2))
    driver.call(worker, ask.Fail(2, "out of memory"))
    with pytest.raises(EpochFailedError, match="out of memory"):
        driver.end(waiting)


@pytest.mark.parametrize("epoch", [-1, 0, 2, 7])
def test_epochs_count_from_one_without_gaps(driver: StateDriver, epoch: int) -> None:
    client, _ = driver.producer(0)
    driver.consumer(0, 0)

    with pytest.raises(RendezvousError, match="is 1; epochs count from 1"):
        driver.call(client, ask.Begin(0, epoch))


def test_begin_of_a_past_epoch_is_refused(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    for epoch in (1, 2):
        driver.call(client, ask.Begin(0, epoch))
        driver.call(worker, commit(subscription, epoch))

    with pytest.raises(RendezvousError, match="epoch 1 is over"):
        driver.call(client, ask.Begin(0, 1))


def test_epoch_record_waits_for_its_epoch(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker, _ = driver.consumer(0, 0)
    anyone = driver.start(worker, ask.GetEpoch(None), 1.0)
    first = driver.start(worker, ask.GetEpoch(1), 2.0)

    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="no epoch is open"):
        driver.end(anyone)

    record = driver.call(client, ask.Begin(0, 1))
    assert driver.end(first) == record


def test_withdrawn_commit_does_not_count(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.call(client, ask.Begin(0, 1))
    gave_up = driver.start(first, commit(a, 1), 1.0)
    driver.sleep(1.0)
    with pytest.raises(RendezvousTimeoutError, match="consumer r0w1 has not committed epoch 1"):
        driver.end(gave_up)

    waiting = driver.start(second, commit(b, 1))
    assert waiting not in driver.outcomes  # its replica's other worker would refuse to serve

    driver.call(first, commit(a, 1))
    assert driver.end(waiting) is None
    assert driver.call(first, commit(a, 1)) is None  # granted: asking again changes nothing


def test_failed_epoch_is_closed_for_everybody(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    first, a = driver.consumer(0, 0, num_workers=2)
    second, b = driver.consumer(0, 1, num_workers=2)
    driver.call(client, ask.Begin(0, 1))
    pending = driver.start(first, commit(a, 1))

    driver.call(second, ask.Fail(1, "out of memory"))
    driver.call(second, ask.Fail(1, "a second reason"))

    for who in (client, first, second):
        assert driver.events[who][-1] == EpochFailed(1, "out of memory")
    assert driver.events[first] == [EpochFailed(1, "out of memory")]
    with pytest.raises(TornError, match="epoch 1 failed: out of memory"):
        driver.end(pending)
    with pytest.raises(TornError, match="out of memory"):
        driver.call(second, commit(b, 1))
    with pytest.raises(EpochFailedError, match="epoch 1 failed: out of memory"):
        driver.call(client, ask.Begin(0, 1))
    with pytest.raises(EpochFailedError, match="epoch 1 failed: out of memory"):
        driver.call(first, ask.GetEpoch(1))

    record = driver.call(client, ask.Begin(0, 2))

    assert record.live == ((a.consumer, a.incarnation), (b.consumer, b.incarnation))


def test_failing_what_is_not_open(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    with pytest.raises(RendezvousError, match="epoch 1 cannot fail: the last one is 0"):
        driver.call(client, ask.Fail(1, "early"))
    driver.call(client, ask.Begin(0, 1))
    driver.call(worker, commit(subscription, 1))
    driver.call(client, ask.AwaitClose(0, 1))

    driver.call(client, ask.Fail(1, "late"))  # its end was told

    assert driver.events[worker] == []
    assert driver.call(client, ask.Begin(0, 2)).epoch == 2
