"""Direct placement: what is read from the trainer's own memory into the model's.

Where a slice is one run of bytes on both sides, and the memory of both sides is registered and
stays where it is, one READ moves it: no pack, no slot, no scatter.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from rdt_plan.cutting import Piece, cut, in_order
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
        for producer in producers:
            names = set()
            for region in producer.sources:
                params = manifest.params[region.param : region.param + 1]
                if not params or params[0].held_by(producer.rank) is None:
                    raise PlanError(
                        f"producer {producer.rank}: expected sources among the names that it "
                        f"holds, found parameter {region.param} of {len(manifest.params)}"
                    )
                names.add(params[0].name)
            sources[producer.rank] = frozenset(names)
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
                shape, stride = slice_.shape, slice_.stride
                run = replace(copies[0], shape=shape, stride=stride, source_stride=stride)
                direct.append((slice_, (run,)))
            else:
                rest[slice_] = copies
        return direct, rest

    def _takes(self, copy: Placement) -> bool:
        return (
            (copy.module, copy.param) in self.destinations
            and copy.dtype == copy.slice.dtype
            and is_run(copy.slice)
            and in_order(copy)
            and all(
                extent == 1 or stride == step
                for extent, stride, step in zip(
                    copy.shape, copy.stride, contiguous_stride(copy.shape), strict=True
                )
            )
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
        for slice_, copies in cut(*piece, max_bytes):
            if not parts or slice_.num_bytes > room:
                parts.append([])
                room = max_bytes
            parts[-1].append((slice_, copies))
            room -= slice_.num_bytes
    return parts
