"""Four FSDP2 ranks before two workers, over NIXL: by gather, and by shards."""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rdt_plan import Manifest
from rdt_trainer import JobSettings, ModuleSource, RdtTrainer, ShardedModuleSource, SourceError
from rdt_trainer.source import adapt
from rdt_trainer.testing import TorchEngineClient
from rdt_trainer.testing.rank_processes import RankProcesses
from rdt_transport.wire.nixl import NixlWire

NUM_RANKS = 4
NUM_WORKERS = 2
SETTINGS = JobSettings(NUM_RANKS, max_chunk_bytes=256)
SOURCES = {"gather": ModuleSource, "shards": ShardedModuleSource}


class Layer(nn.Module):
    """Seven rows over four ranks, and three: the last rank has one of them, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 6))
        self.norm = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(10, 6))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.tied = self.embed


class Small(nn.Module):
    """Two of four ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3))


class TrainingRank:
    """A rank with a model, and its trainer."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.client = TorchEngineClient(NixlWire, num_workers=NUM_WORKERS) if rank == 0 else None
        self.trainer: RdtTrainer | None = None

    def start(self, kind: str, dtype: torch.dtype | None, model: type[nn.Module] = Model) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.module = model()
        for layer in getattr(self.module, "layers", ()):
            fully_shard(layer)
        fully_shard(self.module)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1.0)
        self.source = SOURCES[kind](self.module, dtype=dtype)
        self.trainer = RdtTrainer(
            self.source, self.client, rank=self.rank, settings=SETTINGS, timeout_seconds=60
        )
        self.trainer.init()

    def send_and_step(self) -> tuple[dict, list, tuple[int, int]]:
        """What the model was, what arrived, and the bytes that left here; a step comes between."""
        sent = {
            name: parameter.detach().full_tensor().to(self.dtype or parameter.dtype)
            for name, parameter in self.module.named_parameters()
        }
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        report = self.trainer.send_weights()
        self.optimizer.step()
        # Copies: whatever crosses a pipe is moved into shared memory.
        workers = () if self.client is None else self.client.workers
        arrived = [{name: t.clone() for name, t in each.items()} for each in workers]
        return sent, arrived, (report.bytes_direct, report.bytes_staged)

    def needed(self) -> int:
        """The bytes that the workers need of what this rank holds."""
        params = adapt(self.source, rank=self.rank, num_producers=NUM_RANKS).params
        total = 0
        for param in Manifest.build(params).params:
            if (box := param.box(self.rank)) is None:
                continue
            rows = param.shape[0]
            borders = (0, rows // 2, rows) if rows % 2 == 0 else (0, rows)
            copies = 1 if rows % 2 == 0 else NUM_WORKERS
            for low, high in pairwise(borders):
                held = min(high, box.start[0] + box.shape[0]) - max(low, box.start[0])
                total += copies * max(held, 0) * (param.num_bytes // rows)
        return total

    def replace(self) -> str:
        parameter = self.module.layers[0].w
        if self.rank == 1:
            parameter._local_tensor = parameter._local_tensor.clone()
        try:
            self.trainer.send_weights()
        except SourceError as error:
            return f"SourceError: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def stop(self) -> None:
        self.trainer.close()


@contextmanager
def rank_of(rank: int) -> Generator[TrainingRank]:
    yield TrainingRank(rank)


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Generator[RankProcesses]:
    with RankProcesses(rank_of, NUM_RANKS, tmp_path_factory.mktemp("ranks") / "store") as ranks:
        yield ranks


@pytest.fixture
def ranks(processes: RankProcesses) -> Generator[RankProcesses]:
    yield processes
    processes.ask("stop")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def rows(worker: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(NUM_WORKERS)[worker] if tensor.shape[0] % NUM_WORKERS == 0 else tensor


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as they are", "masters"])
@pytest.mark.parametrize("kind", list(SOURCES))
def test_every_sync_is_exact_with_a_step_right_after_it(ranks, kind, dtype) -> None:
    ranks.ask("start", kind, dtype)
    seen = set()
    for _ in range(3):
        answers = ranks.ask("send_and_step")
        sent, arrived, _ = answers[0]
        assert "tied" not in sent and len(sent) == 10
        for worker, received in enumerate(arrived):
            for name, whole in sent.items():
                assert bits(received[name]) == bits(rows(worker, whole)), (worker, name)
        seen.add(tuple(bits(sent["embed"])))
        if kind == "shards":
            for (_, _, (direct, staged)), needed in zip(answers, ranks.ask("needed"), strict=True):
                assert (direct, staged) == (needed, 0)  # all of it where it is, or is cast to
    assert len(seen) == 3


def test_ranks_that_hold_nothing_take_part(ranks) -> None:
    ranks.ask("start", "shards", None, Small)
    for _ in range(2):
        answers = ranks.ask("send_and_step")
        sent, arrived, _ = answers[0]
        assert [bits(worker["w"]) for worker in arrived] == [bits(r) for r in sent["w"].chunk(2)]
        assert [direct for _, _, (direct, _) in answers] == [12, 12, 0, 0]


def test_a_shard_that_was_replaced_fails_the_sync_everywhere_by_name(ranks) -> None:
    ranks.ask("start", "shards", None)
    ranks.ask("send_and_step")
    for rank, answer in enumerate(ranks.ask("replace")):
        assert answer.startswith("SourceError" if rank == 1 else "SyncFailedError"), answer
        assert "layers.0.w: producer 1 registered" in answer
