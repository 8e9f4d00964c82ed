"""A rank of `bench_sources`: trains a sharded model of known sizes, and measures its own memory."""

import ctypes
import gc
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rdt_plan import ParamMeta
from rdt_trainer import JobSettings, ModuleSource, RdtTrainer, ShardedModuleSource
from rdt_trainer.source import adapt
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire

__all__ = ["Found", "Sizes", "SourceRank", "Way", "rank_of"]

NUM_WORKERS = 2
SOURCES = {"gather": ModuleSource, "shards": ShardedModuleSource}
SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """How the weights are served.

    Attributes:
        source: of `SOURCES`.
        is_master: fp32 parameters, served as bf16; else bf16 ones.
        direct: whether workers read what is stable into their tensors.
        stable: whether masters are cast into an area that stays, which `ShardedModuleSource` can;
            else each as it is served.
    """

    source: str
    is_master: bool
    direct: bool
    stable: bool = True

    def __str__(self) -> str:
        masters = ", fp32 masters" if self.is_master else ""
        if not self.stable:
            return f"{self.source}{masters} cast one by one"
        return f"{self.source}{masters}{'' if self.direct else ', through slots'}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Layers of equal matrices, whose rows four ranks cut into pieces of different sizes."""

    num_layers: int
    num_tensors: int
    rows: int
    columns: int

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.columns * torch.bfloat16.itemsize

    @property
    def group_bytes(self) -> int:
        return self.num_tensors * self.tensor_bytes

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Sharded over all ranks; a layer is whole only while it is made."""
        module, layers = nn.Module(), nn.ModuleList()
        module.layers = layers
        for _ in range(self.num_layers):
            shape = (self.rows, self.columns)
            layer = nn.ParameterList(
                torch.ones(shape, dtype=dtype) for _ in range(self.num_tensors)
            )
            fully_shard(layer)
            layers.append(layer)
        return module


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured, in bytes.

    Attributes:
        extra: the most that it had resident from before its trainer was made until it had synced.
        rings: of that, the slots that workers read from.
        staged: of that, the area that masters are cast into.
        left: what workers read from this rank in one sync.
        needed: what they need of what it holds; of a whole tensor that all ranks gather, a share.
    """

    extra: int
    rings: int
    staged: int
    left: int
    needed: int


class SourceRank:
    """One rank; rank 0 also is the workers, so its memory says nothing."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks

    def measure(self, way: Way, sizes: Sizes, settings: JobSettings, num_syncs: int) -> Found:
        """Make the trainer, sync, and close it."""
        module = sizes.build(torch.float32 if way.is_master else torch.bfloat16)
        source = SOURCES[way.source](module, dtype=torch.bfloat16, stable=way.stable)
        client = None
        if self._rank == 0:
            client = TorchEngineClient(NixlWire, num_workers=NUM_WORKERS, direct=way.direct)
        gc.collect()  # of the last measurement, or it is resident before this one
        ctypes.CDLL(None).malloc_trim(0)
        torch.distributed.barrier()
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        trainer = RdtTrainer(
            source, client, rank=self._rank, settings=settings, timeout_seconds=SECONDS
        )
        with trainer:
            trainer.init()
            reports = [trainer.send_weights() for _ in range(num_syncs)]
            extra = _status_bytes("VmHWM") - before
            rings = _ring_bytes(trainer)
            torch.distributed.barrier()
        params = adapt(source, rank=self._rank, num_producers=self._num_ranks).params
        stable = source.stable_tensors().values() if way.is_master and way.stable else ()
        areas = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in stable}
        return Found(
            extra,
            rings,
            sum(area.nbytes() for area in areas.values()),
            reports[-1].bytes_direct + reports[-1].bytes_staged,
            sum(self._needed(param) for param in params),
        )

    def _needed(self, param: ParamMeta) -> int:
        """Of rows that two workers divide."""
        if not param.mesh_shape:
            return param.num_bytes // self._num_ranks
        if (box := param.box(self._rank)) is None:
            return 0
        rows = param.shape[0]
        borders = [worker * rows // NUM_WORKERS for worker in range(NUM_WORKERS + 1)]
        stop = box.start[0] + box.shape[0]
        held = sum(max(min(b, stop) - max(a, box.start[0]), 0) for a, b in pairwise(borders))
        return held * (param.num_bytes // rows)


def _ring_bytes(trainer: RdtTrainer) -> int:
    """Of the slots that a trainer's producer packs into."""
    assert trainer._job is not None
    rings = trainer._job.producer._rings._rings.values()
    return sum(ring.arena.buffer.nbytes for ring in rings if ring.arena is not None)


def _status_bytes(field: str) -> int:
    """A size of this process, as Linux tells it."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) << 10


@contextmanager
def rank_of(rank: int, num_ranks: int) -> Generator[SourceRank]:
    """For `rdt_trainer.testing.rank_processes`."""
    yield SourceRank(rank, num_ranks)
