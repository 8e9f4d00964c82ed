"""Direct placement: what is read from the trainer's own memory into the model's.

Where a slice is one run of bytes on both sides, and the memory of both sides is registered and
stays where it is, one READ moves it: no pack, no slot, no scatter.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from rdt_plan.cutting import Piece, cut
from rdt_plan.errors import PlanError
from rdt_plan.placement import Placement
from rdt_plan.slices import Slice, contiguous_stride
from rdt_plan.streams import Stream

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest
    from rdt_plan.records import ProducerRecord

__all__ = ["DirectRule", "is_run", "runs_within"]


@dataclass(frozen=True, slots=True)
class DirectRule:
    """Which memory of both sides a plan may read and write directly.

    Attributes:
        sources: by rank, the names of which it holds what it holds as one registered, contiguous
            tensor that stays where it is.
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
        all_names, holders = [param.name for param in manifest.params], manifest.ownership.holders
        for producer in producers:
            rank, names = producer.rank, []
            for number, _, _ in producer.sources:
                if number >= len(all_names) or rank not in holders(all_names[number]):
                    raise PlanError(
                        f"producer {rank}: expected sources among the names that it holds, found "
                        f"parameter {number} of {len(all_names)}"
                    )
                names.append(all_names[number])
            sources[rank] = frozenset(names)
        return cls(sources, frozenset(destinations))

    def without(self, modules: Collection[str]) -> "DirectRule":
        """The rule with no destination in ``modules``."""
        kept = {place for place in self.destinations if place[0] not in modules}
        return replace(self, destinations=frozenset(kept))

    def split(self, owner: int, stream: Stream) -> tuple[list[Piece], Stream]:
        """What of ``stream``, which ``owner`` serves, is direct, and all else; both in order.

        Direct is a slice that has one placement, which copies all its bytes in order from one run
        to another. Its placement is spelled as a run too: with the shape of the slice.
        """
        names = self.sources.get(owner)
        if not names:
            return [], stream
        direct: list[Piece] = []
        rest: Stream = {}
        for slice_, copies in stream.items():
            if slice_.name in names and len(copies) == 1 and self._takes(copies[0]):
                direct.append((slice_, (_as_run(copies[0]),)))
            else:
                rest[slice_] = copies
        return direct, rest

    def _takes(self, copy: Placement) -> bool:
        return (
            (copy.module, copy.param) in self.destinations
            and copy.dtype == copy.slice.dtype
            and is_run(copy.slice)
            and _is_one_run(copy.slice.shape, copy.shape, copy.source_stride, copy.stride)
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


def _as_run(copy: Placement) -> Placement:
    _, _, _, shape, stride = copy.slice
    if copy.shape == shape and copy.stride == copy.source_stride == stride:
        return copy
    return Placement(
        copy.slice, copy.module, copy.param, copy.offset, shape, stride, copy.dtype, stride
    )


def is_run(slice_: Slice) -> bool:
    """Whether a canonical slice is one run of bytes.

    >>> is_run(Slice("w", "int8", 3, (4,), (1,))), is_run(Slice("w", "int8", 0, (4,), (2,)))
    (True, False)
    """
    return slice_.stride in ((), (1,)) and prod(slice_.shape) > 0


def runs_within(pieces: Iterable[Piece], max_bytes: int) -> list[list[Piece]]:
    """Direct ``pieces`` in order, as many a list as fit ``max_bytes``; larger ones are cut.

    >>> runs = [Slice("w", "int8", at, (n,), (1,)) for at, n in ((0, 5), (8, 3))]
    >>> pieces = [(s, (Placement(s, "m", "p", 0, s.shape, (1,), "int8", (1,)),)) for s in runs]
    >>> [[slice_.numel for slice_, _ in part] for part in runs_within(pieces, max_bytes=4)]
    [[4], [1, 3]]
    """
    parts: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        num_bytes = piece[0].num_bytes
        for slice_, copies in cut(*piece, max_bytes) if num_bytes > max_bytes else [piece]:
            num_bytes = slice_.num_bytes
            if not parts or num_bytes > room:
                parts.append([])
                room = max_bytes
            parts[-1].append((slice_, copies))
            room -= num_bytes
    return parts
