import inspect

import pytest

from rdt_transport.testing import wire_contract, wire_refusals
from rdt_transport.testing.wire_contract import CONTRACT
from rdt_transport.testing.wire_pair import MakeWire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire


def in_process() -> MakeWire:
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


def in_process_deferred() -> MakeWire:
    fabric = InProcessFabric(read_polls=3)
    return lambda role: InProcessWire(fabric, role)


def nixl() -> MakeWire:
    return NixlWire


def nixl_with_threads() -> MakeWire:
    return lambda role: NixlWire(role, num_threads=3)


WIRES = (in_process, in_process_deferred, nixl, nixl_with_threads)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.__name__)
def test_contract(wire, check):
    check(wire())


def test_every_check_of_the_contract_runs_on_every_wire():
    written = {
        function
        for module in (wire_contract, wire_refusals)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("check_") and name != "check_wire"
    }
    run = {mark.args[0]: set(mark.args[1]) for mark in test_contract.pytestmark}

    assert set(CONTRACT) == written
    assert run == {"check": written, "wire": set(WIRES)}
