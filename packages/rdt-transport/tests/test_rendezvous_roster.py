"""Who takes part in a job: producers, its session, consumers, offers."""

from dataclasses import replace

import pytest

from rdt_plan import WIRE_VERSION, ConsumerId, Manifest, ParamMeta, encode_manifest
from rdt_plan.records import Offer, Subscription
from rdt_transport.errors import (
    DisagreementError,
    RendezvousError,
    RendezvousTimeoutError,
    TornError,
    VersionMismatchError,
)
from rdt_transport.rendezvous import (
    ProducerLost,
    SessionChanged,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.events import Announced
from rdt_transport.rendezvous.packing import pack
from rdt_transport.rendezvous.sealed import SealedOffer
from rdt_transport.testing.job_records import make_offer, make_producer, make_subscription
from rdt_transport.testing.state_driver import StateDriver, commit, subscribe


@pytest.fixture
def driver() -> StateDriver:
    return StateDriver()


def test_job_waits_for_every_producer_and_names_the_missing() -> None:
    driver = StateDriver(num_producers=4)
    asker = driver.connect()
    driver.producer(0)
    driver.producer(1)
    call = driver.start(asker, ask.GetJob(), 5.0)

    driver.sleep(4.9, alive=(1, 2, 3))

    assert call not in driver.outcomes

    driver.sleep(0.1, alive=(1, 2, 3))

    with pytest.raises(RendezvousTimeoutError, match=r"5 s: producers 2, 3 have not published"):
        driver.end(call)


def test_session_begins_with_the_last_producer() -> None:
    driver = StateDriver(num_producers=2)
    asker = driver.connect()
    call = driver.start(asker, ask.GetJob())
    _, second = driver.producer(1)
    _, first = driver.producer(0)

    job = driver.end(call)

    assert job.producers == (first, second)
    assert job.manifest == b"manifest"
    assert job.wire_version == WIRE_VERSION
    assert (job.num_producers, job.num_slots, job.lookahead, job.num_replicas) == (2, 2, 1, 2)
    assert driver.events[asker] == []


def test_publishing_twice_is_idempotent(driver: StateDriver) -> None:
    client, record = driver.producer(0)
    session = driver.call(client, ask.GetJob()).session

    driver.call(client, ask.Publish(record, b"manifest"))

    assert driver.call(client, ask.GetJob()).session == session


def test_two_live_producers_of_one_rank_disagree(driver: StateDriver) -> None:
    _, first = driver.producer(0)

    with pytest.raises(DisagreementError, match="two trainers that disagree") as caught:
        driver.producer(0)

    assert first.incarnation in str(caught.value)


def test_manifests_that_differ_disagree() -> None:
    driver = StateDriver(num_producers=2)
    driver.producer(0)

    with pytest.raises(DisagreementError, match="two trainers that disagree") as caught:
        driver.producer(1, manifest_digest="c" * 64)

    assert "a" * 64 in str(caught.value)
    assert "c" * 64 in str(caught.value)


def test_the_first_difference_of_two_manifests_is_named() -> None:
    driver = StateDriver(num_producers=2)
    manifests = [Manifest.build([ParamMeta("w", "int8", shape)]) for shape in ((4,), (2, 2))]
    calls = []
    for rank, manifest in enumerate(manifests):
        record = make_producer(rank, manifest_digest=manifest.digest)
        packed = pack(encode_manifest(manifest))
        calls.append(driver.start(driver.connect(), ask.Publish(record, packed)))

    driver.end(calls[0])
    with pytest.raises(
        DisagreementError,
        match=r"'w': shape is \(4,\) on producer 0, \(2, 2\) on producer 1; .*make metadata equal",
    ):
        driver.end(calls[1])

    record = make_producer(1, manifest_digest=manifests[0].digest)
    driver.call(driver.connect(), ask.Publish(record, pack(encode_manifest(manifests[0]))))
    assert len(driver.call(driver.connect(), ask.GetJob()).producers) == 2


def test_the_manifest_is_wanted_once() -> None:
    driver = StateDriver(num_producers=3)
    first, second, third = (make_producer(rank) for rank in range(3))
    clients = [driver.connect() for _ in range(3)]

    assert driver.call(clients[0], ask.Publish(first, b"")) is True
    assert driver.call(clients[0], ask.Publish(first, b"manifest")) is False
    assert driver.call(clients[1], ask.Publish(second, b"")) is False
    other = replace(third, manifest_digest="e" * 64)
    assert driver.call(clients[2], ask.Publish(other, b"")) is True
    with pytest.raises(DisagreementError, match="two trainers that disagree"):
        driver.call(clients[2], ask.Publish(other, b"another"))
    assert driver.call(clients[2], ask.Publish(third, b"")) is False
    assert driver.call(driver.connect(), ask.GetJob()).manifest == b"manifest"
    for client in clients:
        driver.lose(client)
    assert driver.call(driver.connect(), ask.Publish(make_producer(0), b"")) is True


def test_rank_outside_the_job_is_refused(driver: StateDriver) -> None:
    with pytest.raises(DisagreementError, match="producer 1 is not one of the job's 1"):
        driver.producer(1)


@pytest.mark.parametrize("goodbye", [True, False])
def test_new_producer_incarnation_is_a_new_session(goodbye: bool) -> None:
    driver = StateDriver(num_producers=2)
    client, _ = driver.producer(0)
    driver.producer(1)
    worker, subscription = driver.consumer(0, 0)
    before = driver.call(worker, ask.GetJob()).session
    assert driver.call(worker, ask.GetJob(before)) is None  # it is known already
    driver.call(client, ask.Begin(0, 1))
    driver.call(worker, commit(subscription, 1))

    if goodbye:
        driver.call(client, ask.Leave())
    else:
        driver.lose(client)
    waiting = driver.start(worker, ask.GetJob(before))  # known, but not the next one
    anew, _ = driver.producer(0)

    after = driver.end(waiting).session
    assert after != before
    failed, lost, changed = driver.events[worker]
    assert failed.epoch == 1  # no rank had asked how it ended
    assert isinstance(lost, ProducerLost)
    assert lost.rank == 0
    assert ("left" if goodbye else "its connection closed") in lost.reason
    assert changed == SessionChanged(after)
    assert driver.call(worker, ask.ListSubscriptions()) == ()
    with pytest.raises(TornError, match="not subscribed in this session"):
        driver.call(worker, ask.Ready(subscription.consumer, subscription.incarnation))

    driver.call(worker, subscribe(subscription, after))
    driver.call(worker, ask.Ready(subscription.consumer, subscription.incarnation))

    record = driver.call(anew, ask.Begin(0, 1))
    assert (record.session, record.epoch) == (after, 1)


def test_plan_for_an_earlier_session_is_refused(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    worker = driver.connect()
    before = driver.call(worker, ask.GetJob()).session
    driver.lose(client)
    driver.producer(0)

    with pytest.raises(RendezvousError, match="fetch the job again"):
        driver.call(worker, subscribe(make_subscription(0, 0), before))


def test_restarted_trainer_may_bring_another_manifest(driver: StateDriver) -> None:
    client, _ = driver.producer(0)
    driver.lose(client)

    driver.producer(0, manifest_digest="c" * 64)

    (producer,) = driver.call(driver.connect(), ask.GetJob()).producers
    assert producer.manifest_digest == "c" * 64


@pytest.mark.parametrize(
    ("theirs", "upgrade"), [(WIRE_VERSION + 1, "rdt-trainer"), (WIRE_VERSION - 1, "rdt-vllm")]
)
def test_other_wire_version_is_refused_naming_both(theirs: int, upgrade: str) -> None:
    driver = StateDriver()
    worker = driver.connect()
    subscription = make_subscription(0, 0, wire_version=theirs)

    with pytest.raises(VersionMismatchError, match=f"upgrade {upgrade}") as caught:
        driver.call(worker, subscribe(subscription))  # no producer yet: refused anyhow

    assert f"wire version {theirs}" in str(caught.value)
    assert f"version {WIRE_VERSION}" in str(caught.value)


def test_producers_see_only_their_own_tables() -> None:
    driver = StateDriver(num_producers=2)
    first, _ = driver.producer(0)
    second, _ = driver.producer(1)
    worker, subscription = driver.consumer(0, 0, owners=(0, 1))

    (pushed,) = driver.events[second]

    assert isinstance(pushed, Announced)
    assert pushed.subscription.open() == replace(subscription, tables=(subscription.tables[1],))
    seen = driver.call(first, ask.GetSubscription(subscription.consumer)).open()
    assert seen.tables == (subscription.tables[0],)
    assert driver.call(worker, ask.GetSubscription(subscription.consumer)).open() == subscription
    assert driver.call(worker, ask.GetSubscription(ConsumerId(0, 1))) is None
    assert driver.events[worker] == []


def test_live_consumer_keeps_its_place(driver: StateDriver) -> None:
    driver.producer(0)
    _, subscription = driver.consumer(0, 0)

    with pytest.raises(DisagreementError, match="consumer r0w0") as caught:
        driver.consumer(0, 0)

    assert subscription.incarnation in str(caught.value)


@pytest.mark.parametrize(
    ("subscription", "said"),
    [
        (make_subscription(2, 0), r"r2w0 is of no replica of the job, whose replicas are \[0, 1\]"),
        (make_subscription(0, 2, num_workers=2), "r0w2 is outside of its replica's 2 workers"),
        (make_subscription(0, 0, owners=(1,)), "producer 1"),
        (
            make_subscription(0, 0, num_slots=3),
            "build the plan with the settings",
        ),
        (make_subscription(0, 1, num_workers=3), "r0w0 says its replica has 2 workers"),
    ],
)
def test_subscription_that_does_not_fit_the_job(subscription: Subscription, said: str) -> None:
    driver = StateDriver()
    driver.producer(0)
    if subscription.consumer.worker:
        driver.consumer(0, 0, num_workers=2)

    with pytest.raises(DisagreementError, match=said):
        driver.call(driver.connect(), subscribe(subscription))


def offered(*offers: Offer) -> ask.MakeOffers:
    return ask.MakeOffers(tuple(map(SealedOffer.seal, offers)))


def test_offers_wait_for_every_owner_and_name_the_missing() -> None:
    driver = StateDriver(num_producers=2)
    first, one = driver.producer(0)
    second, two = driver.producer(1)
    worker, subscription = driver.consumer(0, 0, owners=(0, 1))
    late = driver.start(worker, ask.GetOffers(subscription.consumer, subscription.incarnation), 1.0)
    offers = [make_offer(subscription, one), make_offer(subscription, two)]

    driver.call(first, offered(offers[0]))
    driver.sleep(1.0)

    with pytest.raises(RendezvousTimeoutError, match="no offer of producer 1 for consumer r0w0"):
        driver.end(late)

    waiting = driver.start(
        worker, ask.GetOffers(subscription.consumer, subscription.incarnation), 1.0
    )
    driver.call(second, offered(offers[1]))

    assert [offer.open() for offer in driver.end(waiting)] == offers


def test_offers_of_the_dead_are_refused_and_those_to_the_dead_passed_over() -> None:
    driver = StateDriver()
    client, record = driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    other, alive = driver.consumer(1, 0)
    offers = make_offer(subscription, record), make_offer(alive, record)

    with pytest.raises(RendezvousError, match="earlier incarnation of producer 0"):
        driver.call(client, offered(make_offer(subscription, make_producer(0))))
    driver.lose(worker)
    driver.call(client, offered(*offers))
    found = driver.call(other, ask.GetOffers(alive.consumer, alive.incarnation))
    assert [offer.open() for offer in found] == [offers[1]]
    with pytest.raises(RendezvousError, match="r0w0 is not subscribed"):
        driver.call(client, ask.GetOffers(subscription.consumer, "0" * 32))


def test_offers_of_the_dropped_say_why(driver: StateDriver) -> None:
    driver.producer(0)
    worker, subscription = driver.consumer(0, 0)
    asked = ask.GetOffers(subscription.consumer, subscription.incarnation)
    waiting = driver.start(worker, asked, 5.0)
    driver.call(worker, ask.Drop(subscription.consumer, subscription.incarnation, "no room"))

    with pytest.raises(TornError, match="no room"):
        driver.end(waiting)
    with pytest.raises(TornError, match="no room"):
        driver.call(worker, asked)


def test_a_large_replica_costs_no_more_than_its_members() -> None:
    driver = StateDriver()
    client, _ = driver.producer(0)
    driver.consumer(0, 0, num_workers=1 << 62)
    begin = driver.start(client, ask.Begin(0, 1), 1.0)
    driver.sleep(1.0)

    with pytest.raises(RendezvousTimeoutError, match=r"r0w1 has not subscribed; .*; and more"):
        driver.end(begin)
