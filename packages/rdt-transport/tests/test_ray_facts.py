"""What the ray wire is built around: where Ray does otherwise one day, the wire can be simpler."""

import importlib
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Trainer:
    """Holds its process up, as a trainer in `send_weights` does."""

    def train(self, until: str) -> None:
        while not Path(until).exists():
            threading.Event().wait(0.05)

    def ring(self) -> bool:
        return True


def test_a_call_of_a_busy_actor_waits_until_its_method_ends(tmp_path: Path) -> None:
    """So an office beside the process, and no calls of the trainer's own actor."""
    trainer: Any = ray.remote(num_cpus=0)(Trainer).remote()
    assert ray.get(trainer.ring.remote(), timeout=60)
    training, rung = trainer.train.remote(str(tmp_path / "done")), trainer.ring.remote()
    assert ray.wait([rung], timeout=1.0) == ([], [rung])
    (tmp_path / "done").touch()
    assert ray.get([training, rung], timeout=60) == [None, True]


def test_what_a_process_put_itself_it_gets_uncopied() -> None:
    """So a read within one process is a copy of ours."""
    ours = torch.arange(10)
    (found,) = ray.get(ray.put([ours], _tensor_transport="nixl"))
    assert found.data_ptr() == ours.data_ptr()


def test_what_an_object_lands_in_has_the_shape_of_all_of_it() -> None:
    """So an object for each set of regions: none can be read in part."""
    store: Any = importlib.import_module("ray.experimental.rdt.rdt_store")
    with pytest.raises(ValueError, match="Shape of tensor_buffer"):
        store.validate_tensor_buffers([torch.zeros(4)], [(torch.Size([8]), torch.float32)])


def test_nobody_can_tell_ray_how_its_agent_is_to_make_progress() -> None:
    """So the method that makes it is replaced, in `rdt_transport.wire._ray_agent`."""
    transport: Any = importlib.import_module("ray.experimental.rdt.nixl_tensor_transport")
    make = inspect.unwrap(transport.NixlTensorTransport._make_nixl_agent)
    assert list(inspect.signature(make).parameters) == ["self", "backend"]
    assert list(inspect.signature(transport.NixlTensorTransport).parameters) == []
