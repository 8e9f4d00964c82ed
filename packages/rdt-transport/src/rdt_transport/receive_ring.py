"""The receive ring of one consumer: where the chunks of its plan land."""

import torch

from rdt_plan import Chunk, SyncPlan
from rdt_transport.memory import Arena
from rdt_transport.wire.base import Region

__all__ = ["ReceiveRing"]


class ReceiveRing:
    """The plan's receive slots, each large enough for its largest chunk.

    Attributes:
        buffer: uint8, 1-D; what a wire registers.
    """

    def __init__(self, plan: SyncPlan, device: torch.device | str) -> None:
        self._arena = Arena(plan.num_slots, max(1, plan.receive_slot_bytes), device)
        self.buffer = self._arena.buffer
        # Made once: slicing a tensor costs as much as posting a small read.
        self._packed = {
            chunk.index: self._arena.slot(chunk.receive_slot)[: chunk.serve.num_bytes]
            for chunk in plan.chunks
            if chunk.receive_slot is not None
        }

    def region(self, chunk: Chunk) -> Region:
        """Where the wire writes ``chunk``, which is not direct."""
        packed = self.packed(chunk)
        return Region(packed.data_ptr(), packed.numel(), packed.device.index or 0)

    def packed(self, chunk: Chunk) -> torch.Tensor:
        """The received bytes of ``chunk``: uint8, 1-D, a view of its receive slot."""
        return self._packed[chunk.index]
