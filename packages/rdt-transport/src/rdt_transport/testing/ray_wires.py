"""Ray wires of processes that a test spawns, and a tensor transport that only a test would use."""

import os
from importlib import import_module
from typing import Any

import torch

from rdt_transport.wire.ray import RayWire

__all__ = ["PROC_MEMORY", "proc_memory_wire", "register_proc_memory", "serving_wire"]

PROC_MEMORY = "PROC_MEMORY"
"""Ray's name of the transport: host memory of processes of one user, read through /proc."""


def serving_wire(role: str, address: str) -> RayWire:
    """A wire that can be read, in a process that attaches itself."""
    return RayWire(role, address=address)


def proc_memory_wire(role: str, address: str) -> RayWire:
    """The same over `PROC_MEMORY`."""
    register_proc_memory()
    return RayWire(role, transport=PROC_MEMORY, address=address)


def register_proc_memory() -> None:
    """Have Ray know `PROC_MEMORY` in this process, which lands in new tensors only."""
    experimental: Any = import_module("ray.experimental")
    known = import_module("ray.experimental.rdt.util").transport_manager_info
    managers = import_module("ray.experimental.rdt.tensor_transport_manager")

    class ProcMemory(experimental.TensorTransportManager):
        def tensor_transport_backend(self) -> str:
            return PROC_MEMORY

        @staticmethod
        def is_one_sided() -> bool:
            return True

        @staticmethod
        def can_abort_transport() -> bool:
            return True

        def actor_has_tensor_transport(self, actor: Any) -> bool:
            return True

        def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Any) -> Any:
            metadata = managers.TensorTransportMetadata(
                tensor_meta=[(each.shape, each.dtype) for each in rdt_object], tensor_device="cpu"
            )
            metadata.places = os.getpid(), [each.data_ptr() for each in rdt_object]
            return metadata

        def get_communicator_metadata(self, *_: Any) -> Any:
            return managers.CommunicatorMetadata()

        def recv_multiple_tensors(
            self, obj_id: str, metadata: Any, communicator: Any, target_buffers: Any = None
        ) -> list[torch.Tensor]:
            process, addresses = metadata.places
            assert target_buffers is None, "it lands in new tensors only"
            landed = [torch.empty(shape, dtype=dtype) for shape, dtype in metadata.tensor_meta]
            with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
                for tensor, address in zip(landed, addresses, strict=True):
                    memory.seek(address)
                    found = bytearray(memory.read(tensor.nbytes))
                    tensor.view(torch.uint8).copy_(torch.frombuffer(found, dtype=torch.uint8))
            return landed

        def send_multiple_tensors(self, *_: Any) -> None:
            raise NotImplementedError(PROC_MEMORY)

        def garbage_collect(self, *_: Any) -> None:
            return None

        def abort_transport(self, *_: Any) -> None:
            return None

    if PROC_MEMORY not in known:
        experimental.register_tensor_transport(PROC_MEMORY, ["cpu"], ProcMemory, torch.Tensor)
