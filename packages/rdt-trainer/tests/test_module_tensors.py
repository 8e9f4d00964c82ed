import pytest
import torch
from torch import nn

from rdt_trainer.errors import SourceError
from rdt_trainer.module_tensors import module_tensors


def test_parameters_come_first_then_the_buffers_that_are_kept():
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("cache", torch.zeros(1), persistent=False)
    both = module_tensors(nn.Sequential(layer), persistent_buffers=True)
    assert list(both)[:3] == ["0.weight", "0.bias", "0.running_mean"]
    assert "0.cache" not in both
    assert list(module_tensors(layer, persistent_buffers=False)) == ["weight", "bias"]


def test_shards_of_fsdp1_are_refused_and_summoned_parameters_served(tmp_path):
    """Two ranks: outside of summon_full_params a name stands for a flat piece."""
    import torch.multiprocessing as mp

    mp.spawn(_look_inside_fsdp1, args=(f"file://{tmp_path}/store",), nprocs=2)


def _look_inside_fsdp1(rank: int, init_method: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    try:
        for use_orig_params, name in ((True, r"\d\.weight"), (False, "_flat_param")):
            module = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
            with pytest.raises(SourceError, match=rf"{name} is FSDP1's.*summon_full_params"):
                module_tensors(module, persistent_buffers=False)
            with FullyShardedDataParallel.summon_full_params(module, writeback=False):
                tensors = module_tensors(module, persistent_buffers=False)
                assert [(n, tuple(t.shape)) for n, t in tensors.items()] == [
                    ("0.weight", (4, 4)),
                    ("0.bias", (4,)),
                    ("1.weight", (4, 4)),
                    ("1.bias", (4,)),
                ]
    finally:
        torch.distributed.destroy_process_group()
