"""FSDP2 ranks, each in a process of its own, that drive inference engines of another process.

The engines stay with the tests that share them; what a rank asks of them goes through a pipe.
"""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rdt_trainer import (
    Client,
    ClientError,
    JobSettings,
    ModuleSource,
    RdtTrainer,
    ShardedModuleSource,
)
from rdt_trainer.client import PauseMode
from rdt_vllm.testing.tiny_models import TINY_QWEN3, TINY_QWEN3_MOE, TinyModel, draw_weights

__all__ = ["MODELS", "NUM_RANKS", "SOURCES", "FsdpRank", "PipedClient", "answered", "rank_of"]

NUM_RANKS = 4
TIMEOUT_SECONDS = 120.0
SOURCES = {"gather": ModuleSource, "shards": ShardedModuleSource}


def uneven(model: TinyModel, **sizes: int) -> TinyModel:
    """With a vocabulary, and other sizes, that four ranks cut into pieces of different sizes."""
    name = f"{model.name}-uneven"
    return TinyModel(name, model.model_type, {**model.settings, "vocab_size": 510, **sizes})


MODELS = {
    model.name: model
    for model in (
        uneven(TINY_QWEN3, intermediate_size=250),
        uneven(TINY_QWEN3_MOE, num_experts=6),  # fused; the last rank has none
    )
}


class PipedClient:
    """A client that another process answers for, see `answered`."""

    def __init__(self, connection: Connection) -> None:
        self.name = "piped engine"
        self._connection = connection

    def init(self, init_info: Mapping[str, Any]) -> None:
        self._call("init", dict(init_info))

    def start(self) -> None:
        self._call("start")

    def update(self, update_info: Mapping[str, Any]) -> None:
        self._call("update", dict(update_info))

    def finish(self, weight_version: str | None = None) -> None:
        self._call("finish", weight_version)

    def pause(self, mode: PauseMode = "abort") -> None:
        self._call("pause", mode)

    def resume(self) -> None:
        self._call("resume")

    def reset_prefix_cache(self) -> None:
        self._call("reset_prefix_cache")

    def shutdown(self) -> None:
        self._call("shutdown")

    def close(self) -> None:
        """Whoever answers closes the client."""

    def _call(self, method: str, *arguments: object) -> None:
        self._connection.send((method, arguments))
        if (problem := self._connection.recv()) is not None:
            raise ClientError(f"{method}: {problem}", server_text=problem)


@contextmanager
def answered(client: Client) -> Generator[Connection]:
    """The end of a pipe that a `PipedClient` in another process takes; answered by a thread."""
    ours, theirs = get_context("spawn").Pipe()

    def answer() -> None:
        while (request := ours.recv()) is not None:
            method, arguments = request
            try:
                getattr(client, method)(*arguments)
                ours.send(None)
            except Exception as error:
                ours.send(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=answer, name="piped engine", daemon=True)
    thread.start()
    try:
        yield theirs
    finally:
        theirs.send(None)
        thread.join(TIMEOUT_SECONDS)
        ours.close()
        theirs.close()


class FsdpRank:
    """A rank that trains: its shards of a model, and that model whole, to draw weights in."""

    def __init__(self, rank: int, name: str, *engines: Connection) -> None:
        self.rank = rank
        self.clients: list[Client] | None = [*map(PipedClient, engines)] if rank == 0 else None
        self.num_replicas = len(engines)
        self.whole = MODELS[name].build(seed=1)
        self.model: Any = MODELS[name].build(seed=1)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def start(self, kind: str) -> None:
        self.trainer = RdtTrainer(
            SOURCES[kind].of_transformers(self.model),
            self.clients,
            rank=self.rank,
            # small chunks, so that layers are cut and slots are reused many times
            settings=JobSettings(NUM_RANKS, self.num_replicas, max_chunk_bytes=16 << 10),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self.trainer.init()

    def send(self, seed: int) -> tuple[int, ...]:
        """Who has the weights drawn from ``seed``, which change as soon as they are sent."""
        draw_weights(self.whole, seed)
        for sharded, whole in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            assert isinstance(sharded, DTensor)
            mesh, placements = sharded.device_mesh, sharded.placements
            drawn = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
            sharded.detach().copy_(drawn)
        committed = self.trainer.send_weights().committed
        for sharded in self.model.parameters():
            sharded.detach().fill_(7)
        return committed

    def sizes(self) -> set[int]:
        """How many rows this rank has of its tensors."""
        return {sharded._local_tensor.shape[0] for sharded in self.model.parameters()}

    def stop(self) -> None:
        self.trainer.close()


@contextmanager
def rank_of(rank: int, name: str, *engines: Connection) -> Generator[FsdpRank]:
    yield FsdpRank(rank, name, *engines)
