"""Playing one rank of a parallel layout in a single process.

Its process groups are torch's "fake" ones, whose collectives do nothing: loading weights needs
none, and the parameters come out as that rank's shards.
"""

from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

from census.modes import Mode

__all__ = ["play_rank"]


def play_rank(vllm_config: VllmConfig, mode: Mode) -> None:
    """Become rank ``mode.rank`` of ``mode.size``; once a process."""
    assert mode.rank is not None
    dist.init_process_group("fake", rank=mode.rank, world_size=mode.size, store=FakeStore())
    make_group: Any = dist.new_group

    def make_fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make_group(ranks, **{**kwargs, "backend": "fake"})

    patches: list[tuple[Any, str, Any]] = [
        (dist, "new_group", make_fake_group),
        (
            shm_broadcast.MessageQueue,
            "create_from_process_group",
            staticmethod(lambda *args, **kwargs: None),
        ),
        (
            cpu_communicator.CpuCommunicator,
            "_all_group_ranks_share_shm_group_name",
            lambda self: False,
        ),
        (parallel_state, "_node_count", lambda group: 1),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(
            world_size=mode.size, rank=mode.rank, local_rank=mode.rank, backend="fake"
        )
        parallel_state.initialize_model_parallel(mode.size, 1, backend="fake")
