"""What a push did, or would do, server by server."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rdt_plan import ChunkTable, Subscription

__all__ = ["PushOutcome", "ServerOutcome", "Weights", "WorkerReads", "reads_of"]


class Weights(StrEnum):
    """Which a server has."""

    OLD = "old"
    UNKNOWN = "unknown"
    """Perhaps a mixture, which it must not serve."""
    NEW = "new"


@dataclass(frozen=True, slots=True)
class WorkerReads:
    """What one worker reads of the checkpoint in one push.

    Attributes:
        worker: its number in its deployment.
        owner: the rank it reads from; a push has only rank 0.
        num_chunks: reads, of which ``num_direct`` go from the mapped files into the model itself.
        bytes_direct: what these move.
        bytes_staged: what passes through slots, the padding between slices included.
        num_tensors: of which it reads at least a part.
    """

    worker: int
    owner: int
    num_chunks: int
    num_direct: int
    bytes_direct: int
    bytes_staged: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class ServerOutcome:
    """One server.

    Attributes:
        url: of it.
        workers: what its workers read, by worker and owner.
        failure: why it does not serve the new weights; None when it does. None in a dry run.
        is_paused: it was left paused.
        was_paused: it was paused before the push came.
        weights: which it has.
        is_pausing: it was asked to pause, let go since, and has not answered the first.
    """

    url: str
    workers: tuple[WorkerReads, ...]
    failure: str | None = None
    is_paused: bool = False
    weights: Weights = Weights.OLD
    was_paused: bool = False
    is_pausing: bool = False

    @property
    def state(self) -> str:
        """In words, and what to do about it."""
        if not self.is_paused:
            late = _MAY_PAUSE if self.is_pausing else ""
            return f"{self.url} serves the {self.weights} weights{late}"
        if self.was_paused and self.weights is Weights.OLD:
            return f"{self.url} was left paused, {_WAS_PAUSED}"
        return f"{self.url} was left paused, {_PAUSED[self.weights]}"


_MAY_PAUSE = (
    "; a pause under way may still land: check GET /is_paused, and POST /resume to it if that "
    "answers true"
)

_WAS_PAUSED = (
    "as it was before this push, which has not touched its weights: an earlier one may have left a "
    "mixture; push again, or POST /resume to it if you know that its weights are whole"
)

_PAUSED = {
    Weights.OLD: "with the old weights: it was told to resume, and did not say that it has: check "
    "GET /is_paused, and POST /resume to it if that answers true",
    Weights.UNKNOWN: "as its workers may hold a mixture of old and new weights: push again, or "
    "restart it",
    Weights.NEW: "with the new weights, as what it cached of the old ones may be left: push again, "
    "or POST /reset_prefix_cache and /resume to it",
}


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """All of them.

    Attributes:
        checkpoint: what was pushed.
        num_tensors: in it.
        num_bytes: of them.
        weight_version: what servers report from now on.
        is_dry_run: nothing was pushed.
        is_verified: what the servers without a failure hold was compared with the checkpoint.
        seconds: that the push itself took; 0 in a dry run.
        servers: in the order they were given.
    """

    checkpoint: str
    num_tensors: int
    num_bytes: int
    weight_version: str
    is_dry_run: bool
    is_verified: bool
    seconds: float
    servers: tuple[ServerOutcome, ...]

    @property
    def exit_status(self) -> int:
        """0: all servers serve the weights, or would; 1: some do not; 3: none does."""
        failed = sum(server.failure is not None for server in self.servers)
        return 0 if not failed else 3 if failed == len(self.servers) else 1

    def to_json(self) -> dict[str, Any]:
        """Builtin types only."""
        return {**asdict(self), "exit_status": self.exit_status}


def reads_of(subscriptions: Iterable[Subscription], replica: int) -> tuple[WorkerReads, ...]:
    """Those of one replica's workers."""
    ours = sorted(
        (each for each in subscriptions if each.consumer.replica == replica),
        key=lambda each: each.consumer,
    )
    return tuple(_reads(each.consumer.worker, table) for each in ours for table in each.tables)


def _reads(worker: int, table: ChunkTable) -> WorkerReads:
    direct = [chunk.num_bytes for chunk in table.chunks if chunk.is_direct]
    return WorkerReads(
        worker=worker,
        owner=table.owner,
        num_chunks=len(table.chunks),
        num_direct=len(direct),
        bytes_direct=sum(direct),
        bytes_staged=sum(chunk.num_bytes for chunk in table.chunks) - sum(direct),
        num_tensors=len({slice_.name for chunk in table.chunks for slice_ in chunk.slices}),
    )
