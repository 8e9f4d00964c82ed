"""The metadata of the whole model, from what each rank says of its part of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rdt_plan import AxisPlacement, ParamMeta
from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SourceError
from rdt_trainer.ranks import gather_from_ranks, group_size
from rdt_trainer.source import SourceMeta

__all__ = ["HeldPart", "merged_metadata"]


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank holds of a parameter that ranks cut along one dim.

    Attributes:
        name: its checkpoint name.
        dtype: what the source yields it as.
        shape: of the part.
        dim: the dim that is cut, as ``torch.chunk`` cuts.
        index: which part it is, in the order of that dim.
        count: how many parts there are.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    index: int
    count: int


Held = HeldPart | SourceMeta
Exchange = Callable[[list[Held]], Sequence[Iterable[Held]]]


def merged_metadata(held: Iterable[Held], *, exchange: Exchange | None = None) -> list[SourceMeta]:
    """A source's ``metadata``, where each rank knows only what it holds; equal on every rank.

    For pipeline stages, experts, and tensor parallelism that torch's ``DTensor`` does not tell of.
    Ranks that name a parameter own it; names are in gather groups, in the order in which ranks
    come. Make it once: it is a collective.

    Args:
        held: of this rank. A `SourceMeta` without owners is held whole; one with owners (of
            `ShardedModuleSource`) is kept as it is, and all that name it must say the same.
        exchange: this rank's in, every rank's out, by rank; None: over the default group of
            ``torch.distributed``, whose ranks are then the trainer's. Without one: this rank alone.

    Raises:
        SourceError: ranks differ over a name's dtype, shape or cut, or some part of it is missing;
            names both ranks.
        RankFailedError: another rank's ``held`` raised.
    """
    if exchange is not None:
        everyone = exchange(list(held))
    elif group_size() is None:
        everyone = [list(held)]
    else:
        everyone = gather_from_ranks(lambda: list(held))
    by_name: dict[str, dict[int, Held]] = {}
    for rank, parts in enumerate(everyone):
        for part in parts:
            by_rank = by_name.setdefault(part.name, {})
            if rank in by_rank:
                raise SourceError(f"rank {rank} names {part.name} twice: expected it once")
            by_rank[rank] = part
    return [_merged(name, by_name[name]) for name in group_ordered(by_name)]


def _merged(name: str, by_rank: Mapping[int, Held]) -> SourceMeta:
    first, part = next(iter(by_rank.items()))
    for rank, other in by_rank.items():
        if _in_common(other) != _in_common(part):
            raise SourceError(
                f"{name} is {_said(other)} on rank {rank}, and {_said(part)} on rank {first}: "
                "expected ranks to agree; give different tensors different names"
            )
    if isinstance(part, HeldPart):
        return _of_parts(name, {r: p for r, p in by_rank.items() if isinstance(p, HeldPart)})
    if part.owners is not None:
        return part
    return SourceMeta(name, part.dtype, tuple(part.shape), tuple(by_rank))


def _in_common(held: Held) -> object:
    """What all ranks must say alike; sizes along the dim that is cut may differ."""
    if not isinstance(held, HeldPart):
        return held
    others = (*held.shape[: held.dim], None, *held.shape[held.dim + 1 :])
    return held.dtype, others, held.dim, held.count


def _said(held: Held) -> str:
    dtype = str(held.dtype).removeprefix("torch.")
    if isinstance(held, HeldPart):
        cut = f", part {held.index} of {held.count} along dim {held.dim}"
    else:
        cut = "" if held.owners is None else f" of ranks {list(held.owners)}"
    return f"{dtype}{list(held.shape)}{cut}"


def _of_parts(name: str, parts: Mapping[int, HeldPart]) -> SourceMeta:
    """Owners as a mesh: a row a copy of the parameter, a column a part of it."""
    part = next(iter(parts.values()))
    columns = [[r for r, p in parts.items() if p.index == index] for index in range(part.count)]
    if len({len(column) for column in columns}) != 1 or sum(map(len, columns)) != len(parts):
        held = {rank: each.index for rank, each in parts.items()}
        raise SourceError(
            f"{name} is cut in {part.count} along dim {part.dim}, and ranks hold the parts {held}: "
            "expected each part on equally many ranks"
        )
    extent = sum(parts[column[0]].shape[part.dim] for column in columns)
    shape = (*part.shape[: part.dim], extent, *part.shape[part.dim + 1 :])
    owners = tuple(rank for copy in zip(*columns, strict=True) for rank in copy)
    axes = (AxisPlacement(None), AxisPlacement(part.dim))
    meta = SourceMeta(name, part.dtype, shape, owners, (len(columns[0]), part.count), axes)
    for rank, expected in _sizes(meta):
        if parts[rank].shape[part.dim] != expected:
            raise SourceError(
                f"{name} is {_said(parts[rank])} on rank {rank}: expected {expected} along that "
                f"dim, as torch.chunk cuts {extent} in {part.count}"
            )
    return meta


def _sizes(meta: SourceMeta) -> Iterator[tuple[int, int]]:
    """What each owner holds along the dim that is cut."""
    assert meta.owners is not None
    dim, dtype = meta.placements[1].dim, str(meta.dtype).removeprefix("torch.")
    placements = tuple(map(str, meta.placements))
    param = ParamMeta(meta.name, dtype, meta.shape, meta.owners, meta.mesh_shape, placements)
    for rank in meta.owners:
        box = param.box(rank)
        yield rank, 0 if box is None or dim is None else box.shape[dim]
