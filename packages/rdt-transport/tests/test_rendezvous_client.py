"""Clients against a real server over TCP: whole jobs, many threads, listeners."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rdt_plan import Manifest, ParamMeta, encode_manifest
from rdt_plan.records import EpochRecord
from rdt_transport.errors import (
    RendezvousError,
    RendezvousTimeoutError,
    VersionMismatchError,
)
from rdt_transport.rendezvous import (
    ConsumerDropped,
    RendezvousClient,
    Subscribed,
    roster,
)
from rdt_transport.rendezvous import client as client_module
from rdt_transport.rendezvous.sealed import SealedSubscription
from rdt_transport.testing.job_records import make_offer, make_producer, make_subscription
from rdt_transport.testing.rendezvous_peers import WAIT_SECONDS, Events, make_host

Connect = Callable[..., RendezvousClient]


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


# ---- whole jobs ----------------------------------------------------------------------------------


def test_fleet_syncs_in_threads() -> None:
    """Every rank gets the same records; every worker commits every epoch."""
    num_ranks, num_workers, num_epochs = 3, 2, 5
    host = make_host(num_ranks)

    def producer(rank: int) -> list[EpochRecord]:
        record = make_producer(rank)

        def on_event(event: Any) -> None:
            if isinstance(event, Subscribed):
                client.offer([make_offer(event.subscription, record)])

        with RendezvousClient(host.address, on_event=on_event) as client:
            client.publish(record, b"manifest", WAIT_SECONDS)
            attached.wait(WAIT_SECONDS)
            records = [client.begin(rank, e + 1, WAIT_SECONDS) for e in range(num_epochs)]
            done.wait(WAIT_SECONDS)
            client.leave()
            return records

    def consumer(replica: int, worker: int) -> list[EpochRecord]:
        subscription = make_subscription(
            replica, worker, num_workers=num_workers, owners=tuple(range(num_ranks))
        )
        identity = subscription.consumer, subscription.incarnation
        with RendezvousClient(host.address) as client:
            assert client.job(WAIT_SECONDS).manifest == b"manifest"
            client.subscribe(subscription, WAIT_SECONDS)
            offers = client.offers(subscription.consumer, WAIT_SECONDS)
            assert [offer.rank for offer in offers] == list(range(num_ranks))
            client.ready(*identity)
            attached.wait(WAIT_SECONDS)
            records = []
            for epoch in range(1, num_epochs + 1):
                records.append(client.epoch_record(WAIT_SECONDS, epoch))
                client.commit(*identity, epoch, WAIT_SECONDS)
            done.wait(WAIT_SECONDS)
            client.leave()
            return records

    parties = num_ranks + 2 * num_workers
    attached, done = threading.Barrier(parties), threading.Barrier(parties)
    with ThreadPoolExecutor(parties) as pool:
        runs = [pool.submit(producer, rank) for rank in range(num_ranks)]
        runs += [pool.submit(consumer, r, w) for r in range(2) for w in range(num_workers)]
        outcomes = [run.result() for run in runs]
    host.close()

    assert [record.epoch for record in outcomes[0]] == list(range(1, num_epochs + 1))
    assert all(len(record.live) == 2 * num_workers for record in outcomes[0])
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_subscriptions_come_one_by_one(connect: Connect) -> None:
    client, record = connect(), make_producer(0)
    client.publish(record, b"", WAIT_SECONDS)
    subscriptions = [make_subscription(replica, 0, owners=()) for replica in range(2)]
    for subscription in subscriptions:
        connect().subscribe(subscription, WAIT_SECONDS)

    assert client.subscriptions(WAIT_SECONDS) == subscriptions


@pytest.mark.parametrize(
    ("ours", "trainers", "upgrade"), [(1, 2, "rdt-vllm of the worker"), (2, 1, "rdt-trainer")]
)
def test_a_trainer_of_another_wire_version_is_told_apart_before_its_manifest_is_read(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, ours: int, trainers: int, upgrade: str
) -> None:
    connect().publish(make_producer(0), b"what nobody here can read", WAIT_SECONDS)
    monkeypatch.setattr(roster, "WIRE_VERSION", trainers)  # the server's
    monkeypatch.setattr(client_module, "WIRE_VERSION", ours)
    worker = connect()
    says = f"speaks wire version {ours}, the trainer version {trainers}; upgrade {upgrade}"

    with pytest.raises(VersionMismatchError, match=f"this worker {says}"):
        worker.job(WAIT_SECONDS)
    with pytest.raises(VersionMismatchError, match=f"consumer r0w0 {says}"):
        worker.subscribe(make_subscription(0, 0, wire_version=ours), WAIT_SECONDS)


def test_names_are_numbered_by_the_manifest_that_a_client_published_or_fetched(
    connect: Connect,
) -> None:
    manifest = Manifest.build([ParamMeta(name, "int8", (4,)) for name in ("b", "a")])
    trainer, worker = connect(), connect()
    assert worker.numbers() == {}
    trainer.publish(make_producer(0), manifest, WAIT_SECONDS)

    assert worker.job(WAIT_SECONDS).manifest == encode_manifest(manifest)
    assert trainer.numbers() == worker.numbers() == {"b": 0, "a": 1}
    worker.know(Manifest.build(manifest.params[:1]))
    assert worker.numbers() == {"b": 0}


def test_large_manifest_arrives_whole(connect: Connect) -> None:
    manifest = bytes(range(256)) * (64 << 10)  # 16 MiB
    connect().publish(make_producer(0), manifest, WAIT_SECONDS)

    assert connect().job(WAIT_SECONDS).manifest == manifest


def test_plan_of_an_earlier_session_is_refused_by_what_job_said(connect: Connect) -> None:
    trainer, worker = connect(), connect()
    trainer.publish(make_producer(0), b"", WAIT_SECONDS)
    job = worker.job(WAIT_SECONDS)
    assert worker.job(WAIT_SECONDS) is job  # not sent again
    trainer.leave()
    connect().publish(make_producer(0), b"", WAIT_SECONDS)

    with pytest.raises(RendezvousError, match="fetch the job again"):
        worker.subscribe(make_subscription(0, 0), WAIT_SECONDS)

    assert worker.job(WAIT_SECONDS).session != job.session
    worker.subscribe(make_subscription(0, 0), WAIT_SECONDS)


def test_consumer_whose_tables_cannot_be_read_is_dropped(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, seen = Events(), Events()
    trainer, worker = connect(on_event=events), connect(on_event=seen)
    trainer.publish(make_producer(0), b"", WAIT_SECONDS)
    sealed = SealedSubscription.seal(make_subscription(0, 0))
    broken = replace(sealed, tables=(sealed.tables[0]._replace(text="{}"),))
    monkeypatch.setattr(SealedSubscription, "seal", lambda *_: broken)

    worker.subscribe(sealed.head, WAIT_SECONDS)

    assert "malformed chunk table" in seen.next(ConsumerDropped).reason
    events.next(ConsumerDropped)  # and no Subscribed before


# ---- one client, many threads --------------------------------------------------------------------


def test_waiting_call_blocks_nobody_else(connect: Connect) -> None:
    client = connect()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(client.job, WAIT_SECONDS) for _ in range(8)]
        with pytest.raises(RendezvousTimeoutError, match="producer 0 has not published"):
            client.job(0.0)

        client.publish(make_producer(0), b"", WAIT_SECONDS)

        assert len({run.result().session for run in waiting}) == 1


def test_listener_may_call_fail_and_close(connect: Connect) -> None:
    ended = threading.Event()
    seen: list[Any] = []

    def on_event(event: Any) -> None:
        seen.append(event)
        if len(seen) == 1:
            raise ValueError("a listener's own problem")
        client.job(WAIT_SECONDS)
        client.close()
        ended.set()

    client = connect(on_event=on_event)
    client.publish(make_producer(0), b"", WAIT_SECONDS)
    for replica in range(2):
        connect().subscribe(make_subscription(replica, 0), WAIT_SECONDS)

    assert ended.wait(WAIT_SECONDS)
    assert [type(event) for event in seen] == [Subscribed, Subscribed]
    with pytest.raises(RendezvousError, match="is closed"):
        client.job(WAIT_SECONDS)


def test_close_is_idempotent_and_ends_waiting_calls(connect: Connect) -> None:
    events = Events()
    client = connect(on_event=events)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.job, WAIT_SECONDS)
        with pytest.raises(RendezvousTimeoutError):
            client.job(0.05)  # by now the other call waits

        client.close()
        client.close()

        with pytest.raises(RendezvousError, match="is closed"):
            waiting.result()
    assert events.queue.empty()  # our own doing is no loss
