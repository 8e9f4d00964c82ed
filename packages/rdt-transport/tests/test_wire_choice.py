"""Which wire a name stands for."""

from typing import Any

import pytest
import ray

from rdt_transport.errors import WireError
from rdt_transport.wire import nixl
from rdt_transport.wire import ray as ray_wire
from rdt_transport.wire.choice import WireChoice


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the constructors of both wires were given."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(nixl, "NixlWire", lambda *a, **k: made.append(("nixl", *a, k)))
    monkeypatch.setattr(ray_wire, "RayWire", lambda *a, **k: made.append(("ray", *a, k)))
    return made


@pytest.mark.parametrize("name", ["", "NIXL", "ray:", "nixl:UCX", "rdma", ":ray", "ray wire"])
def test_other_names_are_refused(name):
    with pytest.raises(WireError, match=f"there is no wire {name!r}: expected 'nixl', 'ray' or"):
        WireChoice.parse(name)


def test_nixl_is_the_default(made):
    chosen = WireChoice.parse("nixl")
    assert chosen == WireChoice()
    chosen.serving("producer0")
    chosen.reading("worker", num_threads=4, ray_address="auto")
    assert made == [("nixl", "producer0", {}), ("nixl", "worker", {"num_threads": 4})]
    assert chosen.init_info() == {"wire": "nixl"}


@pytest.mark.parametrize(
    ("name", "transport"), [("ray", "NIXL"), ("ray:cuda_ipc", "cuda_ipc"), ("ray:A:B", "A:B")]
)
def test_ray_serves_where_it_is_attached_and_reads_where_it_is_told(
    made, monkeypatch, name, transport
):
    chosen = WireChoice.parse(name)
    chosen.serving("producer0")
    chosen.reading("worker", num_threads=4, ray_address="10.0.0.1:6379")
    reading = {"serves": False, "transport": transport, "address": "10.0.0.1:6379"}
    assert made == [("ray", "producer0", {"transport": transport}), ("ray", "worker", reading)]

    class Context:
        gcs_address = "10.0.0.1:6379"

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    assert chosen.init_info() == {"wire": name, "ray_address": "10.0.0.1:6379"}
