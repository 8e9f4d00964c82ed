"""Direct placement: what is read from the trainer's own memory into the model's.

Where a slice is one run of bytes on both sides, and the memory of both sides is registered and
stays where it is, one READ moves it: no pack, no slot, no scatter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rdt_plan._sources_form import Sources
from rdt_plan.cutting import Piece, cut
from rdt_plan.errors import PlanError
from rdt_plan.placement import Placement, new_placement
from rdt_plan.slices import Slice, bytes_of, contiguous_stride

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest
    from rdt_plan.records import ProducerRecord

__all__ = ["DirectRule", "Part", "Stream", "is_run", "lands_as_run", "runs_within"]


class Stream(NamedTuple):
    """What one owner serves of one gather group, in first-use order.

    Attributes:
        direct: the one copy of each direct slice, spelled as a run: with the shape of the slice.
        rest: all else.
    """

    direct: list[Placement]
    rest: list[Piece]

    def add(self, piece: Piece, run: Placement | None) -> None:
        """``run``: what `DirectRule.as_run` says of ``piece``."""
        if run is None:
            self.rest.append(piece)
        else:
            self.direct.append(run)


@dataclass(frozen=True, slots=True)
class DirectRule:
    """Which memory of both sides a plan may read and write directly.

    Attributes:
        sources: by rank, the names of which it holds what it holds as one registered, contiguous
            tensor that stays where it is; names that it does not hold may be among them.
        destinations: (module, param) of the tensors of the model that are live, contiguous and
            registered, and that stay where they are.
    """

    sources: Mapping[int, frozenset[str]]
    destinations: frozenset[tuple[str, str]]

    @classmethod
    def of(
        cls,
        manifest: "Manifest",
        producers: "Iterable[ProducerRecord]",
        destinations: Iterable[tuple[str, str]],
    ) -> "DirectRule":
        """The rule of a job whose ``producers`` have published their sources.

        Raises:
            PlanError: a producer declares what it does not hold.
        """
        sources = {}
        names = manifest.names
        holders = list(map(manifest.ownership.holders_by_name.__getitem__, names))
        num_held = manifest.ownership.num_held
        everything = frozenset(names)
        held_by_all: dict[tuple[int, ...], frozenset[int]] = {}  # ranks that hold all these names
        for producer in producers:  # they may have hundreds of thousands in all, often the same
            rank, numbers = producer.rank, tuple(Sources.of(producer.sources).params)
            if not numbers:
                continue
            if numbers[-1] >= len(names):
                raise _not_held(rank, numbers[-1], names)
            ranks = held_by_all.get(numbers)
            if ranks is None:
                of = set(map(holders.__getitem__, numbers))
                ranks = held_by_all[numbers] = frozenset.intersection(*of)
            if rank not in ranks:
                wrong = next(number for number in numbers if rank not in holders[number])
                raise _not_held(rank, wrong, names)
            if len(numbers) == num_held[rank]:  # all that it holds, and it serves no others
                sources[rank] = everything
            else:
                sources[rank] = frozenset([names[number] for number in numbers])
        return cls(sources, frozenset(destinations))

    def without(self, modules: Collection[str]) -> "DirectRule":
        """The rule with no destination in ``modules``."""
        kept = {place for place in self.destinations if place[0] not in modules}
        return replace(self, destinations=frozenset(kept))

    def split(self, owner: int, pieces: list[Piece]) -> Stream:
        """What of ``pieces``, which ``owner`` serves, is direct, and all else."""
        if not self.sources.get(owner):
            return Stream([], pieces)
        stream = Stream([], [])
        for piece in pieces:
            stream.add(piece, self.as_run(owner, piece))
        return stream

    def as_run(self, owner: int, piece: Piece) -> Placement | None:
        """The copy of a direct piece, spelled as a run: with the shape of the slice; else None.

        Direct is a slice that has one placement, which copies all its bytes in order from one run
        to another.
        """
        (name, dtype, _, shape, stride), copies = piece
        if stride not in _RUNS or len(copies) != 1 or name not in self.sources.get(owner, ()):
            return None
        slice_, module, param, at, copied, steps, copied_dtype, source_steps = copies[0]
        if copied_dtype != dtype or (module, param) not in self.destinations:
            return None
        if copied == shape and steps == source_steps == stride:
            return copies[0]
        if not lands_as_run(shape, stride, copied, source_steps, steps):
            return None
        return new_placement((slice_, module, param, at, shape, stride, dtype, stride))


_RUNS = ((1,), ())
"""The strides of a canonical slice that is one run of bytes."""


def _not_held(rank: int, number: int, names: Sequence[str]) -> PlanError:
    return PlanError(
        f"producer {rank}: expected sources among the names that it holds, found parameter "
        f"{number} of {len(names)}"
    )


@lru_cache(maxsize=4096)  # a model's layers are alike
def lands_as_run(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    copied: tuple[int, ...],
    source_steps: tuple[int, ...],
    steps: tuple[int, ...],
) -> bool:
    """Whether a slice is one run of bytes, and copied in order, and whole, to another.

    Args:
        shape, stride: of the canonical slice.
        copied, source_steps, steps: shape, source stride and stride of the copy.
    """
    return (
        stride in _RUNS
        and prod(copied) == prod(shape)
        and all(
            extent == 1 or before == after == step
            for extent, before, after, step in zip(
                copied, source_steps, steps, contiguous_stride(copied), strict=True
            )
        )
    )


def is_run(slice_: Slice) -> bool:
    """Whether a canonical slice is one run of bytes.

    >>> is_run(Slice("w", "int8", 3, (4,), (1,))), is_run(Slice("w", "int8", 0, (4,), (2,)))
    (True, False)
    """
    return slice_.stride in _RUNS and prod(slice_.shape) > 0


class Part(NamedTuple):
    """Direct placements that are read as one, and the bytes of their slices."""

    placements: Sequence[Placement]
    num_bytes: int


def runs_within(direct: Sequence[Placement], max_bytes: int) -> list[Part]:
    """Direct placements in order, as many a part as fit ``max_bytes``; larger ones are cut.

    >>> slices = [Slice("w", "int8", at, (n,), (1,)) for at, n in ((0, 5), (8, 3))]
    >>> runs = [Placement(s, "m", "p", 0, s.shape, (1,), "int8", (1,)) for s in slices]
    >>> [[run.slice.numel for run in part] for part, _ in runs_within(runs, max_bytes=4)]
    [[4], [1, 3]]
    """
    sizes = bytes_of(map(itemgetter(0), direct))
    if sum(sizes) <= max_bytes:
        return [Part(direct, sum(sizes))] if direct else []
    if max(sizes) > max_bytes:
        cuts = chain.from_iterable(cut(run.slice, (run,), max_bytes) for run in direct)
        direct = [run for _, (run,) in cuts]
        sizes = bytes_of(map(itemgetter(0), direct))
    parts: list[Part] = []
    start = total = 0
    for end, num_bytes in enumerate(sizes):
        if total + num_bytes > max_bytes and end > start:
            parts.append(Part(direct[start:end], total))
            start, total = end, 0
        total += num_bytes
    return [*parts, Part(direct[start:], total)]
