"""Chunks: the unit of one READ from one owner within one gather group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from rdt_plan.cutting import Piece, cut
from rdt_plan.direct import Stream, runs_within
from rdt_plan.layout import PackLayout, pack_layouts
from rdt_plan.placement import Placement
from rdt_plan.slices import Slice, bytes_of

__all__ = ["Chunk", "Draft", "ServeChunk", "chunked", "drafts_of"]

_SLICE = itemgetter(0)  # of a placement


@dataclass(frozen=True, slots=True)
class ServeChunk:
    """What a producer must know of one chunk: its row in the consumer's chunk table.

    Attributes:
        seq: position in the consumer's stream to this owner, from 0, restarting each epoch.
        group: index of the gather group all its slices belong to.
        serve_slot: the producer's slot that carries it; None when it is direct: read from the
            producer's own tensors.
        num_bytes: packed size; of a direct chunk, the bytes of its slices.
        slices: in packing order. Each slice of a direct chunk is one run of bytes.
        offsets: where each slice starts in the packed bytes; multiples of 16. () when direct.
    """

    seq: int
    group: int
    serve_slot: int | None
    num_bytes: int
    slices: tuple[Slice, ...]
    offsets: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        """Whether it is read from the producer's own tensors, not from a slot."""
        return self.serve_slot is None

    @property
    def tensors(self) -> str:
        """Which tensors it carries, for messages: the first, and how many more."""
        names = list(dict.fromkeys(slice_.name for slice_ in self.slices)) or ["no tensor"]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One READ of a plan: the producer's row plus what the consumer does with the bytes.

    Attributes:
        index: position in the plan.
        owner: producer rank that serves it.
        serve: the row the producer sees.
        receive_slot: the consumer's slot it lands in; None when it is direct: its slices land
            where their placements say.
        placements: copies to make from the packed bytes, in order; each one's slice is in
            ``serve.slices``. A direct chunk has one a slice, in the same order, of the same
            shape, stride and dtype.
        materialize: modules whose first chunk this is.
        complete: modules whose last chunk this is.
    """

    index: int
    owner: int
    serve: ServeChunk
    receive_slot: int | None
    placements: tuple[Placement, ...]
    materialize: tuple[str, ...]
    complete: tuple[str, ...]

    @property
    def is_direct(self) -> bool:
        """Whether its READ goes from the producer's own tensors into the model's."""
        return self.receive_slot is None


class Draft(NamedTuple):
    """A chunk that is not numbered yet: its slices, their copies, and where they start."""

    slices: tuple[Slice, ...]
    placements: tuple[Placement, ...]
    layout: PackLayout
    is_direct: bool = False


def drafts_of(stream: Stream, max_chunk_bytes: int, max_direct_bytes: int) -> list[Draft]:
    """The chunks of what one owner serves of one group: direct ones first."""
    drafts = [
        Draft(tuple(map(_SLICE, runs)), tuple(runs), PackLayout((), num_bytes), is_direct=True)
        for runs, num_bytes in runs_within(stream.direct, max_direct_bytes)
    ]
    return drafts + chunked(stream.rest, max_chunk_bytes) if stream.rest else drafts


def chunked(pieces: Sequence[Piece], max_chunk_bytes: int) -> list[Draft]:
    """Cut and gather what one owner serves of one group into chunks, in first-use order.

    A slice is cut with all its placements, before pieces are compared, so that pieces that two
    slices share are packed once too. A chunk is closed when its next piece would take it past
    ``max_chunk_bytes``; a piece that cannot be cut further may exceed that alone. No slice may be
    empty, and none may come twice.

    >>> slices = [Slice("w", "int8", 0, (n,), (1,)) for n in (40, 8)]
    >>> copies = [Placement(s, "m", "p", 0, s.shape, (1,), "int8", (1,)) for s in slices]
    >>> pieces = [(slices[0], (copies[0],)), (slices[1], (copies[1],))]
    >>> [[slice_.numel for slice_ in draft.slices] for draft in chunked(pieces, 48)]
    [[40], [8]]
    """
    slices, copies = zip(*pieces, strict=True)
    sizes = bytes_of(slices)
    if max(sizes) > max_chunk_bytes:
        fitting = _fitting(pieces, max_chunk_bytes)
        slices, copies = tuple(fitting), tuple(fitting.values())
        sizes = bytes_of(slices)
    drafts = []
    start = 0
    for layout in pack_layouts(sizes, max_chunk_bytes):
        end = start + len(layout.offsets)
        placements = tuple(chain.from_iterable(copies[start:end]))
        drafts.append(Draft(slices[start:end], placements, layout))
        start = end
    return drafts


def _fitting(pieces: Sequence[Piece], max_chunk_bytes: int) -> dict[Slice, tuple[Placement, ...]]:
    fitting: dict[Slice, tuple[Placement, ...]] = {}
    for slice_, copies in pieces:
        for piece, parts in cut(slice_, copies, max_chunk_bytes):
            fitting[piece] = fitting.get(piece, ()) + parts
    return fitting
