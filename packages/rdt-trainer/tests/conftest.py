"""Both kinds of wires."""

import pytest

from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire


@pytest.fixture
def inprocess() -> MakeWire:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest, inprocess: MakeWire) -> MakeWire:
    return NixlWire if request.param == "nixl" else inprocess
