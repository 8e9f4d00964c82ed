"""A host that does not start or end in time says so, and keeps nobody waiting."""

import logging
import threading
from collections.abc import Iterator

import pytest

from rdt_transport.errors import RendezvousTimeoutError
from rdt_transport.rendezvous import JobSettings, host_local, local_host
from rdt_transport.rendezvous.server import RendezvousServer
from rdt_transport.testing.rendezvous_peers import WAIT_SECONDS, make_host

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets what a test holds up go on; then its thread ends."""
    release = threading.Event()
    yield release
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rdt-rendezvous"):
            thread.join(WAIT_SECONDS)


def test_a_server_that_does_not_end_is_logged(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = RendezvousServer.close

    async def held_up(server: RendezvousServer) -> None:
        release.wait(WAIT_SECONDS)
        await end(server)

    monkeypatch.setattr(RendezvousServer, "close", held_up)
    monkeypatch.setattr(local_host, "_STOP_TIMEOUT_SECONDS", 0.1)
    host = make_host()

    with caplog.at_level(logging.WARNING):
        host.close()

    assert f"{host.address} has not ended within 0.1 s" in caplog.text
    assert "may still hold its port" in caplog.text


def test_a_server_that_does_not_start_is_refused_by_name(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RendezvousServer.start

    async def held_up(server: RendezvousServer, host: str, port: int = 0) -> int:
        release.wait(WAIT_SECONDS)
        return await start(server, host, port)

    monkeypatch.setattr(RendezvousServer, "start", held_up)
    monkeypatch.setattr(local_host, "_START_TIMEOUT_SECONDS", 0.1)

    with pytest.raises(
        RendezvousTimeoutError, match=r"does not listen on 127\.0\.0\.1:0 after 0\.1"
    ):
        host_local("job", "token", JobSettings(1))
