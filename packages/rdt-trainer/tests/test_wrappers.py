import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rdt_trainer.module_tensors import module_tensors
from rdt_trainer.wrappers import unwrapped


class Block(nn.Module):
    """Its submodule is honestly called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def model() -> nn.Module:
    return nn.Sequential(Block(), Block())


def names(module: nn.Module) -> list[str]:
    return list(module_tensors(module, persistent_buffers=True))


PLAIN = names(model())


@pytest.fixture
def one_rank(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_an_honest_module_keeps_its_name():
    assert PLAIN == [
        f"{index}.{name}"
        for index in range(2)
        for name in ("scale", "module.weight", "module.bias")
    ]
    assert names(nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})}))[0] == (
        "module.module.weight"
    )


def test_compile_and_checkpoint_wrappers_leave_no_trace():
    wrapped = model()
    wrapped[0] = torch.compile(checkpoint_wrapper(wrapped[0]))
    wrapped[1].module = checkpoint_wrapper(wrapped[1].module)
    wrapped = torch.compile(wrapped)
    assert any("_orig_mod.0._orig_mod._checkpoint" in n for n, _ in wrapped.named_parameters())
    assert names(wrapped) == PLAIN
    assert type(unwrapped(wrapped)) is nn.Sequential


def test_the_segment_of_data_parallel_wrappers_goes_and_no_other_module(one_rank):
    for wrapped in (
        DataParallel(model()),
        DistributedDataParallel(model()),
        DistributedDataParallel(torch.compile(model())),
        torch.compile(DistributedDataParallel(model())),
    ):
        for name, _ in wrapped.named_parameters():
            assert name.startswith(("module.", "_orig_mod.module."))
        assert names(wrapped) == PLAIN


def test_a_data_parallel_part_of_a_model_loses_its_segment_too(one_rank):
    trained = nn.ModuleDict({"policy": DistributedDataParallel(model()), "module": Block()})
    assert names(trained) == [
        *(f"policy.{name}" for name in PLAIN),
        "module.scale",
        "module.module.weight",
        "module.module.bias",
    ]


def test_fsdp_leaves_no_trace(one_rank):
    sharded = model()
    for block in sharded:
        fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert names(sharded) == PLAIN
    older = FullyShardedDataParallel(
        torch.compile(model()), use_orig_params=True, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.summon_full_params(older, writeback=False):
        assert names(older) == PLAIN
        assert [tuple(p.shape) for p in older.parameters()] == [(2,), (4, 4), (4,)] * 2
