"""A rendezvous in this process and clients of it; both kinds of wires."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from rdt_transport.rendezvous import LocalHost, RendezvousClient
from rdt_transport.testing.rendezvous_peers import make_host
from rdt_transport.testing.sample_job import in_process
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.nixl import NixlWire


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest) -> MakeWire:
    return NixlWire if request.param == "nixl" else in_process()


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and "rdt" in t.name]
    assert left == []


@pytest.fixture
def host(no_thread_is_left: None) -> Iterator[LocalHost]:
    host = make_host()
    yield host
    host.close()


@pytest.fixture(params=["tcp", "local", "mixed"])
def connect(
    host: LocalHost, request: pytest.FixtureRequest
) -> Iterator[Callable[..., RendezvousClient]]:
    """Makes clients: over TCP, of the rendezvous's own process, or one so and one so."""
    clients: list[RendezvousClient] = []

    def connect(**options: Any) -> RendezvousClient:
        is_local = {"tcp": False, "local": True, "mixed": len(clients) % 2 == 0}[request.param]
        make = host.connect if is_local else partial(RendezvousClient, host.address)
        clients.append(make(**options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
