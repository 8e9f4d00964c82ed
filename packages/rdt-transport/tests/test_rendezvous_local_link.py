"""Clients of the rendezvous's own process: what only they can do.

The contract of all clients is in `test_rendezvous_client` and `test_rendezvous_deaths`.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rdt_transport.errors import (
    EpochFailedError,
    RendezvousError,
    RendezvousLostError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
)
from rdt_transport.rendezvous import (
    ConnectionLost,
    EpochFailed,
    JobSettings,
    LocalHost,
    RendezvousClient,
    Subscribed,
)
from rdt_transport.rendezvous.effects import Refusal
from rdt_transport.rendezvous.requests import Begin, Fail
from rdt_transport.rendezvous.state import JobState
from rdt_transport.testing.job_records import make_offer, make_producer, make_subscription
from rdt_transport.testing.rendezvous_peers import WAIT_SECONDS, Events, make_host

Connect = Callable[[LocalHost], RendezvousClient]


def over_tcp(host: LocalHost) -> RendezvousClient:
    return RendezvousClient(host.address)


pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_the_end_of_the_host_ends_them(host: LocalHost) -> None:
    events = Events()
    client = host.connect(events)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.job, WAIT_SECONDS)
        with pytest.raises(RendezvousTimeoutError):
            client.job(0.05)  # by now the other call waits

        host.close()

        with pytest.raises(RendezvousLostError, match="it is closed"):
            waiting.result(WAIT_SECONDS)
    assert "it is closed" in events.next(ConnectionLost).reason
    with pytest.raises(RendezvousLostError):
        client.consumers(WAIT_SECONDS)
    client.close()


def test_a_host_that_is_closed_takes_none(host: LocalHost) -> None:
    host.close()

    with pytest.raises(RendezvousLostError, match="is closed"):
        host.connect()


def test_they_have_no_lease_to_lose() -> None:
    host = make_host(lease_seconds=0.2)
    try:
        with host.connect() as client, ThreadPoolExecutor(1) as pool:
            client.publish(make_producer(0), b"", WAIT_SECONDS)
            waiting = pool.submit(client.begin, 0, 1, 1.0)  # five leases
            with pytest.raises(RendezvousTimeoutError, match="consumer"):
                waiting.result(WAIT_SECONDS)
            assert client.job(WAIT_SECONDS).num_producers == 1
    finally:
        host.close()


def test_a_client_that_comes_as_the_host_ends_is_refused_or_told(host: LocalHost) -> None:
    """Whatever is first on the service's thread; nobody is left waiting."""
    ends = threading.Thread(target=host.close)
    seen = []
    ends.start()
    while not seen:
        events = Events()
        try:
            client = host.connect(events)
            client.consumers(WAIT_SECONDS)
            client.close()
        except RendezvousLostError as error:
            seen.append(str(error))
    ends.join(WAIT_SECONDS)
    assert "closed" in seen[0]


def test_an_interrupted_caller_leaves_the_job_as_it_was(host: LocalHost) -> None:
    """As Ctrl-C, at whatever step of a question it comes; others are answered all the same."""
    interrupts = 0
    with host.connect() as client, RendezvousClient(host.address) as far:
        client.publish(make_producer(0), b"", WAIT_SECONDS)
        caller = threading.get_ident()
        done = threading.Event()

        def interrupt() -> None:
            while not done.wait(2e-4):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(caller), ctypes.py_object(KeyboardInterrupt)
                )

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            while interrupts < 200:
                try:
                    while True:
                        client.consumers(WAIT_SECONDS)
                except KeyboardInterrupt:
                    interrupts += 1
        finally:
            while not done.is_set():
                try:
                    done.set()
                    interrupting.join()
                except KeyboardInterrupt:
                    done.clear()
        try:
            time.sleep(0.01)  # the last one, which may be on its way
        except KeyboardInterrupt:
            pass
        assert client.consumers(WAIT_SECONDS) == far.consumers(WAIT_SECONDS) == ()
        assert client.job(WAIT_SECONDS).num_producers == 1


def test_a_question_of_wrong_types_is_refused_alone(host: LocalHost) -> None:
    """As over TCP: it does not reach the job's state."""
    with host.connect() as client, RendezvousClient(host.address) as far:
        client.publish(make_producer(0), b"", WAIT_SECONDS)
        for each in (client, far):
            with pytest.raises(RendezvousProtocolError):
                each.fail("1", "why")  # type: ignore[arg-type]
        for each in (client, far):
            assert each.job(WAIT_SECONDS).num_producers == 1
            with pytest.raises(RendezvousTimeoutError, match=r"waited 0\.05 s"):
                each.begin(0, 1, 0.05)


def test_a_mistake_of_the_state_concerns_the_question_that_met_it() -> None:
    """It does not come back with every later change, as a question that stays would have it do."""
    state = JobState("job", JobSettings(1), lambda: "ab" * 16)
    state.connected(1, 0.0)
    with pytest.raises(TypeError):
        state.request(1, 1, Fail("1", "why"), 5.0, 0.0)  # type: ignore[arg-type]

    (refusal,) = state.request(1, 2, Begin(0, 1), 0.0, 1.0)

    assert isinstance(refusal, Refusal) and refusal.call == 2
    assert state.tick(2.0) == []


@pytest.mark.parametrize("connect", [over_tcp, LocalHost.connect])
def test_what_one_of_them_does_the_others_hear(host: LocalHost, connect: Connect) -> None:
    """A failure told in this process reaches a socket, and a listener here."""
    events, here = Events(), Events()
    with (
        host.connect() as trainer,
        host.connect(here) as bystander,
        RendezvousClient(host.address, on_event=events) as far,
        connect(host) as worker,
    ):
        record, subscription = make_producer(0), make_subscription(0, 0)
        trainer.publish(record, b"", WAIT_SECONDS)
        worker.subscribe(subscription, WAIT_SECONDS)
        trainer.offer([make_offer(subscription, record)])
        worker.offers(subscription.consumer, WAIT_SECONDS)
        worker.ready(subscription.consumer, subscription.incarnation)
        trainer.begin(0, 1, WAIT_SECONDS)

        trainer.fail(1, "the trainer's own problem")

        for heard in (events, here):
            assert heard.next(EpochFailed) == EpochFailed(1, "the trainer's own problem")
        for client in (far, bystander):
            with pytest.raises(EpochFailedError, match="own problem"):
                client.epoch_record(WAIT_SECONDS, 1)


@pytest.mark.parametrize("num_epochs", [50])
def test_many_syncs_of_clients_near_and_far(host: LocalHost, num_epochs: int) -> None:
    """The trainer here, one worker here and one over TCP, and a bystander that asks all the time:
    each epoch is begun, committed and closed, whoever is first."""
    record = make_producer(0)
    done = threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, Subscribed):
            trainer.offer([make_offer(event.subscription, record)])

    def work(replica: int, connect: Connect) -> None:
        subscription = make_subscription(replica, 0)
        identity = subscription.consumer, subscription.incarnation
        with connect(host) as client:
            client.subscribe(subscription, WAIT_SECONDS)
            client.offers(subscription.consumer, WAIT_SECONDS)
            client.ready(*identity)
            ready.wait(WAIT_SECONDS)
            for epoch in range(1, num_epochs + 1):
                client.epoch_record(WAIT_SECONDS, epoch)
                client.commit(*identity, epoch, WAIT_SECONDS)
            done.wait(WAIT_SECONDS)
            client.leave()

    def ask() -> int:
        asked = 0
        with host.connect() as client:
            while not done.is_set():
                assert len(client.consumers(WAIT_SECONDS)) <= 2  # they leave at the end
                asked += 1
        return asked

    ready = threading.Barrier(3)
    with host.connect(on_event) as trainer, ThreadPoolExecutor(3) as pool:
        trainer.publish(record, b"", WAIT_SECONDS)
        workers = [
            pool.submit(work, replica, connect)
            for replica, connect in enumerate([over_tcp, LocalHost.connect])
        ]
        ready.wait(WAIT_SECONDS)
        asking = pool.submit(ask)
        try:
            for epoch in range(1, num_epochs + 1):
                assert trainer.begin(0, epoch, WAIT_SECONDS).epoch == epoch
                outcome = trainer.await_close(0, epoch, WAIT_SECONDS)
                assert outcome.committed == (0, 1)
                assert outcome.dropped == ()
        finally:
            done.set()
        for worker in workers:
            worker.result(WAIT_SECONDS)
        assert asking.result(WAIT_SECONDS) > 0
    with pytest.raises(RendezvousError, match="is closed"):
        trainer.consumers(WAIT_SECONDS)
