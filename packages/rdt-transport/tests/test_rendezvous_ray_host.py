"""The rendezvous in a real, named Ray actor."""

import importlib.metadata
import queue
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rdt_transport.errors import (
    DisagreementError,
    RayMissingError,
    RendezvousTimeoutError,
    TokenError,
)
from rdt_transport.rendezvous import (
    ConnectionLost,
    JobSettings,
    RendezvousAddress,
    RendezvousClient,
    Subscribed,
    host_in_ray,
    import_ray,
    ray_host,
)
from rdt_transport.testing.job_records import make_offer, make_producer, make_subscription

WAIT_SECONDS = 60.0
SETTINGS = JobSettings(num_producers=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(RayMissingError, match=r"pip install 'rdt-transport\[ray\]'"):
        host_in_ray("job", "token", SETTINGS)


def test_an_old_ray_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.55.1")

    with pytest.raises(RayMissingError, match=r"needs Ray 2\.56 or newer, found 2\.55\.1; install"):
        host_in_ray("job", "token", SETTINGS)
    with pytest.raises(RayMissingError, match=r"^a client over actors needs Ray 2\.56"):
        import_ray("a client over actors")


@pytest.mark.parametrize("version", ["2.56.0", "2.60.0rc1", "3.0.0.dev0"])
def test_a_ray_that_is_new_enough_is_given(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray, "__version__", version)

    assert import_ray() is ray


def test_the_minimum_version_is_the_one_the_package_requires() -> None:
    (requirement,) = (
        each for each in importlib.metadata.requires("rdt-transport") or [] if "ray" in each
    )
    assert ">=" + ".".join(map(str, ray_host._MINIMUM_VERSION)) in requirement


@pytest.mark.parametrize("ray_address", [None, "auto"])
def test_ray_that_is_not_initialised_is_not_started(ray_address: str | None) -> None:
    with pytest.raises(RayMissingError, match=r"call ray\.init\(\) first"):
        host_in_ray("job", "token", SETTINGS, ray_address=ray_address)

    assert not ray.is_initialized()


def test_job_meets_in_a_named_actor(cluster: None) -> None:
    host = host_in_ray("job", "token", SETTINGS)
    again = host_in_ray("job", "token", SETTINGS)
    assert host.address == again.address
    assert ray.get_actor("rdt-rendezvous-job", namespace="rdt") is not None
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    record, subscription = make_producer(0), make_subscription(0, 0)

    with (
        RendezvousClient(host.address, on_event=events.put) as trainer,
        RendezvousClient(again.address) as worker,
    ):
        again.close()  # it did not create the actor
        trainer.publish(record, b"manifest", WAIT_SECONDS)
        assert worker.job(WAIT_SECONDS).producers == (record,)
        worker.subscribe(subscription, WAIT_SECONDS)
        assert events.get(timeout=WAIT_SECONDS) == Subscribed(subscription)
        offer = make_offer(subscription, record)
        trainer.offer([offer])
        assert worker.offers(subscription.consumer, WAIT_SECONDS) == (offer,)
        worker.ready(subscription.consumer, subscription.incarnation)
        assert trainer.begin(0, 1, WAIT_SECONDS) == worker.epoch_record(WAIT_SECONDS)
        worker.commit(subscription.consumer, subscription.incarnation, 1, WAIT_SECONDS)

        host.close()
        host.close()

        assert isinstance(events.get(timeout=WAIT_SECONDS), ConnectionLost)
    with pytest.raises(ValueError, match="rdt-rendezvous-job"):
        ray.get_actor("rdt-rendezvous-job", namespace="rdt")


def test_actor_that_is_killed_closes_its_connections(cluster: None) -> None:
    host = host_in_ray("killed", "token", SETTINGS, namespace="elsewhere")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with RendezvousClient(host.address, on_event=events.put):
        ray.kill(ray.get_actor("rdt-rendezvous-killed", namespace="elsewhere"))

        assert isinstance(events.get(timeout=WAIT_SECONDS), ConnectionLost)
    host.close()


def test_ranks_that_disagree_about_an_actor(cluster: None) -> None:
    host = host_in_ray("settings", "token", SETTINGS)

    with pytest.raises(DisagreementError, match="'num_producers': 1"):
        host_in_ray("settings", "token", JobSettings(num_producers=2))
    stranger = host_in_ray("settings", "another token", SETTINGS)
    with pytest.raises(TokenError):
        RendezvousClient(stranger.address)

    host.close()


def test_actor_of_the_job_may_host_it_too(cluster: None) -> None:
    """A trainer that is itself a Ray actor."""

    class Trainer:
        def host(self) -> RendezvousAddress:
            self.rendezvous = host_in_ray("nested", "token", SETTINGS)
            return self.rendezvous.address

        def close(self) -> None:
            self.rendezvous.close()

    trainer: Any = ray.remote(Trainer).options(num_cpus=0).remote()
    address = ray.get(trainer.host.remote(), timeout=WAIT_SECONDS)

    assert host_in_ray("nested", "token", SETTINGS).address == address
    with (
        RendezvousClient(address) as client,
        pytest.raises(RendezvousTimeoutError, match="producer 0 has not published"),
    ):
        client.job(0.1)
    ray.get(trainer.close.remote(), timeout=WAIT_SECONDS)
    ray.kill(trainer)
