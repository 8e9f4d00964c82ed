"""Who holds what of a source in the shape of vLLM 0.32's, whose ranks speak of themselves alone."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rdt_trainer.errors import SourceError
from rdt_trainer.ranks import gather_from_ranks, group_size

__all__ = ["Exchange", "held_owners"]

Exchange = Callable[[list[str]], Sequence[Collection[str]]]


def held_owners(
    source: Any,
    declared: Callable[[], Sequence[Any]],
    rank: int,
    num_producers: int,
    exchange: Exchange | None,
) -> dict[str, tuple[int, ...]] | None:
    """By name, the ranks that hold it; None where all ranks hold everything.

    Args:
        source: in that shape.
        declared: its metadata; called only where it is needed.
        rank: this one.
        num_producers: how many there are.
        exchange: see `rdt_trainer.source.adapt`, also for what is raised.
    """
    held_names = getattr(source, "held_names", None)
    if num_producers == 1 or not callable(held_names):
        return None

    def mine() -> list[str]:
        metas, held = declared(), held_names()
        return [meta.name for meta in metas] if held is None else sorted(held)

    if exchange is not None:
        everyone = exchange(mine())
    else:
        _check_exchange(rank, num_producers)
        everyone = gather_from_ranks(mine)
    if len(everyone) != num_producers:
        raise SourceError(
            f"rank {rank}: the exchange of held names returned {len(everyone)} ranks: expected "
            f"{num_producers}, one entry for each producer"
        )
    by_rank = [frozenset(names) for names in everyone]
    return {
        meta.name: tuple(owner for owner, names in enumerate(by_rank) if meta.name in names)
        for meta in declared()
    }


def _check_exchange(rank: int, num_producers: int) -> None:
    world_size = group_size()
    if world_size == num_producers:
        return
    found = "torch.distributed is not initialised"
    if world_size is not None:
        found = f"torch.distributed spans {world_size} ranks, not the {num_producers} producers"
    raise SourceError(
        f"rank {rank}: held_names() tells what this rank holds, but not what the others hold, and "
        f"{found}: pass exchange=, or declare owners in metadata"
    )
