"""The page about coming from sharded_rdt: its scripts are run, the second one with real weights."""

import difflib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rdt_vllm.testing.checkpoint import write_checkpoint
from rdt_vllm.testing.http_server import HttpServer
from rdt_vllm.testing.tiny_models import TINY_QWEN3

PAGE = Path(__file__).parent.parent / "docs" / "migrating-from-sharded-rdt.md"
BEFORE, AFTER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_scripts_differ_in_where_one_name_is_from() -> None:
    lines = difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines())
    assert sorted(line for line in lines if line[0] in "-+") == [
        "+     RdtTrainerInitInfo as TrainerInitInfo,",
        "+ from rdt_trainer.vllm_api import (",
        "-     ShardedRDTTrainerInitInfo as TrainerInitInfo,",
        "- from vllm.distributed.weight_transfer.sharded_rdt_trainer import (",
    ]


def test_either_script_names_its_backend() -> None:
    found = []
    for script in (BEFORE, AFTER):
        names: dict[str, Any] = {}
        exec(script, names)
        found.append(names["TrainerInitInfo"].backend)
    assert found == ["sharded_rdt", "rdt"]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_sharded_ranks_and_a_real_server(tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    folder = write_checkpoint(TINY_QWEN3.build(seed=1), tmp_path / "served")
    with HttpServer(folder, tmp_path / "server.log") as server:
        mp.spawn(_train, args=(f"file://{tmp_path}/store", server.url, server.model), nprocs=2)


def _train(rank: int, store: str, url: str, served: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    names: dict[str, Any] = {}
    exec(AFTER, names)
    model = TINY_QWEN3.build(seed=1)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    engine = names["attach"](model, rank, url, 1)
    try:
        first = complete(url, served)
        completions = []
        for seed in (2, 1):
            draw(model, seed)
            names["sync"](engine, rank, url)
            completions.append(complete(url, served))
            torch.distributed.barrier()
        assert completions[0] != first
        assert completions[1] == first
    finally:
        engine.shutdown()
        torch.distributed.destroy_process_group()


def complete(url: str, served: str) -> list[int]:
    """Greedy tokens: equal weights give equal ones."""
    body = {"model": served, "prompt": [1, 2, 3, 5, 8, 13], "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


@torch.no_grad()
def draw(model: Any, seed: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    whole = dict(TINY_QWEN3.build(seed).named_parameters())
    for name, param in model.named_parameters():
        param.copy_(distribute_tensor(whole[name].data, param.device_mesh, param.placements))
