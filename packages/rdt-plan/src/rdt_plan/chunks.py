"""Chunks: the unit of one READ from one owner within one gather group."""

from collections.abc import Iterable
from dataclasses import dataclass

from rdt_plan.cutting import Piece, cut
from rdt_plan.layout import align
from rdt_plan.placement import Placement
from rdt_plan.slices import Slice

__all__ = ["Chunk", "ServeChunk", "chunked"]


@dataclass(frozen=True, slots=True)
class ServeChunk:
    """What a producer must know of one chunk: its row in the consumer's chunk table.

    Attributes:
        seq: position in the consumer's stream to this owner, from 0, restarting each epoch.
        group: index of the gather group all its slices belong to.
        serve_slot: the producer's slot that carries it.
        num_bytes: packed size.
        slices: in packing order.
        offsets: where each slice starts in the packed bytes; multiples of 16.
    """

    seq: int
    group: int
    serve_slot: int
    num_bytes: int
    slices: tuple[Slice, ...]
    offsets: tuple[int, ...]

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
        receive_slot: the consumer's slot it lands in.
        placements: copies to make from the packed bytes, in order; each one's slice is in
            ``serve.slices``.
        materialize: modules whose first chunk this is.
        complete: modules whose last chunk this is.
    """

    index: int
    owner: int
    serve: ServeChunk
    receive_slot: int
    placements: tuple[Placement, ...]
    materialize: tuple[str, ...]
    complete: tuple[str, ...]


def chunked(placements: Iterable[Placement], max_chunk_bytes: int) -> list[list[Piece]]:
    """Deduplicate, cut and gather copies of one owner and group into chunks, in first-use order.

    Equal slices are packed once. A slice is cut with all its placements, before pieces are
    compared, so that pieces that two slices share are packed once too. A chunk is closed when
    its next piece would take it past ``max_chunk_bytes``; a piece that cannot be cut further
    may exceed that alone. No slice may be empty.

    >>> copies = [
    ...     Placement(Slice("w", "int8", 0, (n,), (1,)), "m", "p", 0, (n,), (1,), "int8", (1,))
    ...     for n in (40, 40, 8)
    ... ]
    >>> [[(s.numel, len(p)) for s, p in chunk] for chunk in chunked(copies, 48)]
    [[(40, 2)], [(8, 1)]]
    """
    by_slice: dict[Slice, list[Placement]] = {}
    for placement in placements:
        by_slice.setdefault(placement.slice, []).append(placement)
    pieces: dict[Slice, tuple[Placement, ...]] = {}
    for slice_, copies in by_slice.items():
        for piece, piece_copies in cut(slice_, copies, max_chunk_bytes):
            pieces[piece] = pieces.get(piece, ()) + piece_copies
    chunks: list[list[Piece]] = []
    end = 0
    for piece, piece_copies in pieces.items():
        start = align(end)
        if not chunks or start + piece.num_bytes > max_chunk_bytes:
            chunks.append([])
            start = 0
        chunks[-1].append((piece, piece_copies))
        end = start + piece.num_bytes
    return chunks
