"""Trainer ranks that hold parts of one checkpoint: two pipeline stages of two ranks each.

Imported by the processes of ranks 1 to 3, which need no inference engine.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from rdt_plan import ParamMeta, group_key, group_ordered
from rdt_trainer import Client, JobSettings, RdtTrainer, SyncReport
from rdt_trainer.testing import PieceSource
from rdt_transport.rendezvous import RendezvousAddress

__all__ = ["NUM_RANKS", "TIMEOUT_SECONDS", "Rank", "ownership", "rank_of"]

NUM_RANKS = 4
TIMEOUT_SECONDS = 120.0
LAST = "model.layers.1"  # of the second stage, which also has what follows the layers


def ownership(weights: dict[str, torch.Tensor]) -> list[ParamMeta]:
    """Who holds what: experts by name; attention, embedding and head by rows or columns; the router
    and the layers' norms whole on both ranks of a stage; the last norm whole on all ranks."""
    params = []
    for name in group_ordered(weights):
        tensor = weights[name]
        first = 2 if group_key(name) == LAST or name == "lm_head.weight" else 0
        owners: Iterable[int] = (first, first + 1)
        placements: tuple[str, ...] = ()
        if ".experts." in name:
            expert = int(name.partition(".experts.")[2].partition(".")[0])
            owners = [first + expert % 2]
        elif name == "model.norm.weight":
            owners = range(NUM_RANKS)
        elif tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            placements = ("shard(1)" if name.endswith("o_proj.weight") else "shard(0)",)
        dtype = str(tensor.dtype).removeprefix("torch.")
        mesh = (2,) if placements else ()
        params.append(ParamMeta(name, dtype, tuple(tensor.shape), tuple(owners), mesh, placements))
    return params


class Rank:
    """One trainer rank. What it is asked for in its process is a method of this."""

    def __init__(self, rank: int, file: Path, address: RendezvousAddress, client: Client | None):
        self._weights = load_file(file)
        params = ownership(self._weights)
        self.num_bytes = sum(p.held_by(rank).num_bytes for p in params if p.held_by(rank))
        self.trainer = RdtTrainer(
            PieceSource(params, rank, self._weights),
            client,
            rank=rank,
            settings=settings(),
            rendezvous=address,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def init(self) -> None:
        self.trainer.init()

    def send(self, file: Path) -> SyncReport:
        """A sync of the weights in ``file``."""
        self._weights.update(load_file(file))
        return self.trainer.send_weights()


def settings() -> JobSettings:
    """What all ranks agree on; small chunks, so that slots are reused many times."""
    return JobSettings(num_producers=NUM_RANKS, max_chunk_bytes=16 << 10)


@contextmanager
def rank_of(rank: int, file: Path, address: RendezvousAddress) -> Generator[Rank]:
    """A rank other than 0, for its process."""
    held = Rank(rank, file, address, None)
    with held.trainer:
        yield held
