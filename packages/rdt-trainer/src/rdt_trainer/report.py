"""What one sync did and where its time went."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rdt_plan import ChunkTable

__all__ = ["SyncReport", "bytes_pulled"]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync that at least one replica completed; times are wall seconds of a rank's caller.

    Attributes:
        epoch: its number.
        committed: the replicas that serve with the weights; equal on every rank.
        dropped: all other replicas, with why: they go without these weights, may be torn, and are
            attached again by the next `RdtTrainer.send_weights`; equal on every rank.
        num_bytes: what this rank gathered and offered.
        bytes_direct: what workers read from this rank's own memory, all of them together.
        bytes_staged: what they read from its slots, the padding between slices included. A chunk
            that several workers read counts for each of them.
        begin_seconds: agreeing on the epoch with the other ranks and the consumers.
        gather_seconds: inside the source.
        publish_seconds: waiting for credit, so for consumers to pull earlier groups.
        wait_seconds: after the last group, until nobody reads the sources any more.
        finish_seconds: after that, until every server had installed the weights.
        total_seconds: all of it.
    """

    epoch: int
    num_bytes: int
    bytes_direct: int
    bytes_staged: int
    begin_seconds: float
    gather_seconds: float
    publish_seconds: float
    wait_seconds: float
    finish_seconds: float
    total_seconds: float
    committed: tuple[int, ...]
    dropped: Mapping[int, str] = field(hash=False)


def bytes_pulled(tables: Iterable[ChunkTable]) -> tuple[int, int]:
    """What the consumers of these tables read: directly, and from slots."""
    found = [0, 0]
    for table in tables:
        for chunk in table.chunks:
            found[not chunk.is_direct] += chunk.num_bytes
    return found[0], found[1]
