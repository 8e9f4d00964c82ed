"""A client whose own threads are held up keeps nobody waiting."""

import asyncio
import logging
import threading
import time

import pytest

from rdt_transport.errors import RendezvousTimeoutError
from rdt_transport.rendezvous import LocalHost, RendezvousClient, Subscribed, _link, _socket_link
from rdt_transport.testing.job_records import make_producer, make_subscription
from rdt_transport.testing.rendezvous_peers import WAIT_SECONDS


def join_all(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(WAIT_SECONDS)


def test_a_connection_that_is_not_opened_in_time_is_given_up(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    introduce = _socket_link.introduce

    async def held_up(reader: asyncio.StreamReader, *rest) -> float:
        release.wait(WAIT_SECONDS)  # blocks the whole thread, and its own deadline with it
        return await introduce(reader, *rest)

    monkeypatch.setattr(_socket_link, "introduce", held_up)
    monkeypatch.setattr(_link, "GRACE_SECONDS", 0.1)
    try:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(
                RendezvousTimeoutError, match=r"did not open a connection .* within 0\.2 s"
            ),
        ):
            RendezvousClient(host.address, connect_timeout_seconds=0.1)
        assert "has not ended within 0.1 s" in caplog.text
    finally:
        release.set()
        join_all("rdt-link")  # it sees that it was given up


def test_a_listener_that_does_not_return_is_logged_by_close(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called, release = threading.Event(), threading.Event()

    def on_event(event: object) -> None:
        assert isinstance(event, Subscribed)
        called.set()
        release.wait(WAIT_SECONDS)

    trainer = RendezvousClient(host.address, on_event=on_event)
    trainer.publish(make_producer(0), b"", WAIT_SECONDS)
    with RendezvousClient(host.address) as worker:
        worker.subscribe(make_subscription(0, 0), WAIT_SECONDS)
        assert called.wait(WAIT_SECONDS)
        monkeypatch.setattr(_link, "GRACE_SECONDS", 0.1)
        with caplog.at_level(logging.WARNING):
            trainer.close()
        release.set()
        join_all("rdt-events")
    assert f"rdt-events of the client of {host.address} has not ended within 0.1 s" in caplog.text
    assert "may still run" in caplog.text


def test_a_server_that_is_slow_for_less_than_a_lease_is_waited_for(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is overloaded: it is alive by its lease, so its own answer counts."""
    monkeypatch.setattr(_link, "GRACE_SECONDS", 0.1)
    with RendezvousClient(host.address) as client:
        host._loop.call_soon_threadsafe(time.sleep, 1.0)
        with pytest.raises(RendezvousTimeoutError, match=r"waited 0\.1 s: producer"):
            client.job(0.1)
