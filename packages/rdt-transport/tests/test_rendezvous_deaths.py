"""Deaths over TCP: of workers, of producers, of connections, and of the server."""

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rdt_plan import ConsumerId
from rdt_transport.errors import (
    RendezvousError,
    RendezvousLostError,
    RendezvousTimeoutError,
    TornError,
)
from rdt_transport.rendezvous import (
    ConnectionLost,
    ConsumerDropped,
    ConsumerLeft,
    EpochFailed,
    JobSettings,
    LocalHost,
    ProducerLost,
    RendezvousAddress,
    RendezvousClient,
    Subscribed,
    host_local,
)
from rdt_transport.testing.job_records import make_producer, make_subscription
from rdt_transport.testing.rendezvous_peers import WAIT_SECONDS, Events, Relay, make_host

Connect = Callable[..., RendezvousClient]


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_consumer_that_closes_without_leaving_is_dropped(connect: Connect) -> None:
    events = Events()
    trainer = connect(on_event=events)
    trainer.publish(make_producer(0), b"", WAIT_SECONDS)
    worker, subscription = connect(), make_subscription(0, 0)
    worker.subscribe(subscription, WAIT_SECONDS)
    events.next(Subscribed)

    worker.close()

    dropped = events.next(ConsumerDropped)
    assert dropped.consumer == subscription.consumer
    assert "its connection closed" in dropped.reason
    with pytest.raises(TornError, match="its connection closed"):
        connect().subscribe(subscription, WAIT_SECONDS)


def test_consumer_that_leaves_is_not_dropped(connect: Connect) -> None:
    events = Events()
    trainer = connect(on_event=events)
    trainer.publish(make_producer(0), b"", WAIT_SECONDS)
    worker, subscription = connect(), make_subscription(0, 0)
    worker.subscribe(subscription, WAIT_SECONDS)
    events.next(Subscribed)

    worker.leave()
    worker.close()

    events.next(ConsumerLeft)
    trainer.fail(0, "nothing")  # an answered call: all events before it have been sent
    assert trainer.subscriptions(WAIT_SECONDS) == []
    assert events.queue.empty()


KILLED = """
import sys
from rdt_transport.rendezvous import RendezvousAddress, RendezvousClient
from rdt_transport.rendezvous.sealed import SealedSubscription
from rdt_transport.testing.job_records import make_producer
client = RendezvousClient(RendezvousAddress("127.0.0.1", int(sys.argv[1]), *sys.argv[2:]))
client.publish(make_producer(0), b"", 20.0)
print("published", flush=True)
client.begin(0, 1, 1000.0)
"""


def test_killed_producer_is_lost_in_the_midst_of_a_call(connect: Connect) -> None:
    events = Events()
    client = connect(on_event=events)
    address = client.address
    arguments = [str(address.port), address.job, address.token]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"published\n"

        process.kill()

        assert "its connection closed" in events.next(ProducerLost).reason
    client.publish(make_producer(0), b"", WAIT_SECONDS)


def test_lease_of_an_unreachable_worker_ends() -> None:
    """No packet says that it is gone: only its silence does, on both sides."""
    host = make_host(lease_seconds=1.5)
    events, worker_events = Events(), Events()
    relay = Relay(host.address)
    try:
        with (
            RendezvousClient(host.address, on_event=events) as trainer,
            RendezvousClient(relay.address, on_event=worker_events) as worker,
        ):
            trainer.publish(make_producer(0), b"", WAIT_SECONDS)
            subscription = make_subscription(0, 0)
            identity = subscription.consumer, subscription.incarnation
            worker.subscribe(subscription, WAIT_SECONDS)
            worker.ready(*identity)
            trainer.begin(0, 1, WAIT_SECONDS)

            relay.freeze()

            events.next(Subscribed)
            assert "its lease of 1.5 s ended" in events.next(ConsumerDropped).reason
            assert events.next(EpochFailed).epoch == 1
            assert "silent" in worker_events.next(ConnectionLost).reason
            with pytest.raises(RendezvousLostError):
                worker.commit(*identity, 1, WAIT_SECONDS)
            assert trainer.subscriptions(WAIT_SECONDS) == []  # heartbeats kept the trainer alive
    finally:
        relay.close()
        host.close()


def test_connection_cut_in_the_midst_of_a_call(host: LocalHost) -> None:
    relay = Relay(host.address)
    events = Events()
    with (
        RendezvousClient(relay.address, on_event=events) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.job, WAIT_SECONDS)
        with pytest.raises(RendezvousTimeoutError):
            client.job(0.05)

        relay.close()

        with pytest.raises(RendezvousLostError, match="connection"):
            waiting.result()
        events.next(ConnectionLost)


# ---- the server's end ----------------------------------------------------------------------------


def test_closing_the_server_ends_every_waiting_call() -> None:
    listeners = [Events() for _ in range(3)]
    host = make_host(2)
    clients = [RendezvousClient(host.address, on_event=events) for events in listeners]
    clients[0].publish(make_producer(1), b"", WAIT_SECONDS)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.job, WAIT_SECONDS) for client in clients]
        for client in clients:
            with pytest.raises(RendezvousTimeoutError):
                client.job(0.05)

        host.close()
        host.close()

        for run in waiting:
            with pytest.raises(RendezvousLostError, match="closed"):
                run.result()
    for client, events in zip(clients, listeners, strict=True):
        events.next(ConnectionLost)  # and not that a producer is lost
        with pytest.raises(RendezvousLostError):
            client.drop(ConsumerId(0, 0), "", "too late")
        client.close()
    with pytest.raises(RendezvousLostError, match="is the trainer running"):
        RendezvousClient(host.address)


def test_server_that_never_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RendezvousAddress("127.0.0.1", listener.getsockname()[1], "job", "token")

        with pytest.raises(RendezvousTimeoutError, match=r"did not answer within 0\.1 s"):
            RendezvousClient(address, connect_timeout_seconds=0.1)


def test_host_that_cannot_listen(host: LocalHost) -> None:
    with pytest.raises(RendezvousError, match="cannot listen"):
        host_local("job", "token", JobSettings(1), port=host.address.port)
    with pytest.raises(RendezvousError, match="cannot listen"):
        host_local("job", "token", JobSettings(1), host="203.0.113.1")
    with pytest.raises(RendezvousError, match="non-empty token"):
        host_local("job", "", JobSettings(1))
