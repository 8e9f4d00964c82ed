"""Direct placement: what is read from the trainer's own memory into the model's.

Where a slice is one run of bytes on both sides, and the memory of both sides is registered and
stays where it is, one READ moves it: no pack, no slot, no scatter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from math import prod
from operator import contains
from typing import TYPE_CHECKING, NamedTuple

from rdt_plan._sources_form import Sources
from rdt_plan.cutting import Piece, cut
from rdt_plan.errors import PlanError
from rdt_plan.placement import new_placement
from rdt_plan.slices import Slice, bytes_of, contiguous_stride

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest
    from rdt_plan.records import ProducerRecord

__all__ = ["DirectRule", "Part", "is_run", "runs_within"]


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
        for producer in producers:  # they may have hundreds of thousands in all
            rank, numbers = producer.rank, Sources.of(producer.sources).params
            if numbers and numbers[-1] >= len(names):
                raise _not_held(rank, numbers[-1], names)
            if not all(map(contains, [holders[number] for number in numbers], repeat(rank))):
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

    def split(self, owner: int, stream: Sequence[Piece]) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """What of ``stream``, which ``owner`` serves, is direct, and all else; both in order.

        Direct is a slice that has one placement, which copies all its bytes in order from one run
        to another. Its placement is spelled as a run too: with the shape of the slice.
        """
        names = self.sources.get(owner)
        if not names:
            return (), stream
        direct: list[Piece] = []
        rest: list[Piece] = []
        destinations = self.destinations
        for piece in stream:  # one turn for each slice of a plan
            slice_, copies = piece
            steps = slice_[4]
            if steps in _RUNS and len(copies) == 1 and slice_[0] in names:
                _, module, param, at, shape, stride, copied_dtype, source_stride = copies[0]
                dtype, extents = slice_[1], slice_[3]
                if (module, param) in destinations and copied_dtype == dtype:
                    if shape == extents and stride == source_stride == steps:
                        direct.append(piece)
                        continue
                    if _is_one_run(extents, shape, source_stride, stride):
                        as_run = (slice_, module, param, at, extents, steps, dtype, steps)
                        direct.append((slice_, (new_placement(as_run),)))
                        continue
            rest.append(piece)
        return direct, rest


_RUNS = ((1,), ())
"""The strides of a canonical slice that is one run of bytes."""


def _not_held(rank: int, number: int, names: Sequence[str]) -> PlanError:
    return PlanError(
        f"producer {rank}: expected sources among the names that it holds, found parameter "
        f"{number} of {len(names)}"
    )


@lru_cache(maxsize=4096)  # a model's layers are alike
def _is_one_run(
    slice_shape: tuple[int, ...],
    shape: tuple[int, ...],
    source_stride: tuple[int, ...],
    stride: tuple[int, ...],
) -> bool:
    """Whether all elements of a slice are copied, in order, from one run to another."""
    return prod(shape) == prod(slice_shape) and all(
        extent == 1 or before == after == step
        for extent, before, after, step in zip(
            shape, source_stride, stride, contiguous_stride(shape), strict=True
        )
    )


def is_run(slice_: Slice) -> bool:
    """Whether a canonical slice is one run of bytes.

    >>> is_run(Slice("w", "int8", 3, (4,), (1,))), is_run(Slice("w", "int8", 0, (4,), (2,)))
    (True, False)
    """
    return slice_.stride in _RUNS and prod(slice_.shape) > 0


class Part(NamedTuple):
    """Pieces that are read as one, and the bytes of their slices."""

    pieces: list[Piece]
    num_bytes: int


def runs_within(pieces: Sequence[Piece], max_bytes: int) -> list[Part]:
    """Direct ``pieces`` in order, as many a part as fit ``max_bytes``; larger ones are cut.

    >>> from rdt_plan import Placement
    >>> runs = [Slice("w", "int8", at, (n,), (1,)) for at, n in ((0, 5), (8, 3))]
    >>> pieces = [(s, (Placement(s, "m", "p", 0, s.shape, (1,), "int8", (1,)),)) for s in runs]
    >>> [[slice_.numel for slice_, _ in part] for part, _ in runs_within(pieces, max_bytes=4)]
    [[4], [1, 3]]
    """
    sizes = bytes_of(slice_ for slice_, _ in pieces)
    if max(sizes, default=0) > max_bytes:
        pieces = [each for piece in pieces for each in cut(*piece, max_bytes)]
        sizes = bytes_of(slice_ for slice_, _ in pieces)
    parts: list[Part] = []
    start = total = 0
    for end, num_bytes in enumerate(sizes):
        if total + num_bytes > max_bytes and end > start:
            parts.append(Part(list(pieces[start:end]), total))
            start, total = end, 0
        total += num_bytes
    return [*parts, Part(list(pieces[start:]), total)] if pieces else parts
