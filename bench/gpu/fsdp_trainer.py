"""A rank of an FSDP2 trainer: a Ray actor that holds its shards of every parameter."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.gpu.devices import bound, is_gpu
from bench.gpu.models import fill
from bench.gpu.trainer import INIT_SECONDS, GpuTrainer

__all__ = ["FsdpTrainer"]


class FsdpTrainer(GpuTrainer):
    """Rank ``rank`` of ``num_ranks``, which meet in the file ``meeting``; over NCCL on GPUs.

    Layers are sharded one by one, the rest with the root, as FSDP2 is used for training. No
    forward runs, so parameters stay sharded. All ranks make each call together.
    """

    def __init__(
        self, kind: str, tiny: bool, device: str, rank: int, num_ranks: int, meeting: str
    ) -> None:
        own = bound(device)
        on_gpu: dict[str, Any] = {"device_id": own} if is_gpu(device) else {}
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=INIT_SECONDS),
            **on_gpu,
        )
        super().__init__(kind, tiny, device)
        self._rank, self._num_ranks = rank, num_ranks
        mesh = init_device_mesh(own.type, (num_ranks,))
        for layer in self._module.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self._module, mesh=mesh)

    def set_version(self, version: int) -> None:
        """This rank's shards of new weights, in place, finished when this returns."""
        for name, sharded in self._weights.items():
            whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=self._device)
            pieces = fill(whole, name, version).chunk(self._num_ranks)
            if self._rank < len(pieces):
                sharded.to_local().copy_(pieces[self._rank])
        self._synchronize()

    def sync(self) -> tuple[float, float]:
        """As of one rank, all ranks beginning together, as after an optimizer's step."""
        distributed.barrier()
        return super().sync()

    def end(self) -> None:
        super().end()
        distributed.destroy_process_group()
