"""One chunk's packed bytes on their way to where its placements say."""

from collections.abc import Callable
from dataclasses import replace

import torch

from rdt_bake import PlanReplay
from rdt_plan import Chunk
from rdt_transport.chunk_copies import scatter_copies
from rdt_transport.copies import CopyTable
from rdt_vllm.errors import InstallError

__all__ = ["ChunkScatter"]


class ChunkScatter:
    """Scatters one chunk of a plan, sync after sync. Not thread-safe.

    Copies of bits, nearly all, are one copy table; the replay does what is left.

    Args:
        chunk: one that takes a slot.
        replay: of the same plan.
        find: gives the tensor at (module, param), asked anew for every sync.
        device: of those, and of the packed bytes.
    """

    def __init__(
        self,
        chunk: Chunk,
        replay: PlanReplay,
        find: Callable[[str, str], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._chunk = chunk
        self._replay = replay
        self._find = find
        copies, self._targets, others = scatter_copies(chunk)
        self._table = CopyTable(copies, device)
        self._table.prepare()
        self._rest = replace(chunk, placements=others) if others else None

    def run(self, packed: torch.Tensor) -> None:
        """Enqueue all of it on the current stream; the chunk's modules are open.

        Raises:
            InstallError: ``packed`` (uint8, 1-D) is too short.
            SliceError, ReplayError: a region leaves its tensor.
        """
        if packed.numel() < self._chunk.serve.num_bytes:
            raise InstallError(
                f"expected {self._chunk.serve.num_bytes} packed bytes of "
                f"{self._chunk.serve.tensors}, found {packed.numel()}"
            )
        self._table.run([packed], [self._find(*target) for target in self._targets])
        if self._rest is not None:
            self._replay.place(self._rest, packed)
