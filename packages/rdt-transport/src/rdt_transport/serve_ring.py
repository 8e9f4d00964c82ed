"""One serve ring: its slots, the chunks they carry, and who reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rdt_plan import ChunkTable, ConsumerId, ServeChunk
from rdt_transport.errors import SyncAbortedError
from rdt_transport.memory import Arena
from rdt_transport.pack import PackList

__all__ = ["ServeRing", "Served"]


@dataclass(slots=True)
class ServeRing:
    """The ring of every consumer with one plan.

    Attributes:
        table: the chunk table of whoever came first; its later readers' are equal.
        arena: the slots; None where every chunk is direct.
        readers: by incarnation, those that were not met yet included.
    """

    table: ChunkTable
    arena: Arena | None
    readers: dict[bytes, ConsumerId] = field(default_factory=dict)
    _packs: dict[int, PackList] = field(default_factory=dict)

    def prepare(self) -> None:
        """Get ready what the first `pack` of each chunk would, kernels included."""
        for chunk in self.table.chunks:
            if chunk.serve_slot is not None:
                self._pack_list(chunk).prepare()

    def pack(self, seq: int, sources: Mapping[str, torch.Tensor]) -> None:
        """Fill chunk ``seq``'s serve slot from full, contiguous ``sources``, on the current stream.

        Nothing is done for a direct chunk.
        """
        chunk = self.table.chunks[seq]
        if chunk.serve_slot is None:
            return  # direct: it is read where it lies
        try:
            self._pack_list(chunk).run(sources)
        except Exception as error:
            readers = ", ".join(f"consumer {each}" for each in sorted(self.readers.values()))
            raise SyncAbortedError(
                f"packing chunk seq {seq} ({chunk.tensors}) for {readers} failed: {error}"
            ) from error

    def _pack_list(self, chunk: ServeChunk) -> PackList:
        if chunk.seq not in self._packs:
            assert self.arena is not None and chunk.serve_slot is not None
            self._packs[chunk.seq] = PackList(chunk, self.arena.slot(chunk.serve_slot))
        return self._packs[chunk.seq]


@dataclass(frozen=True, slots=True)
class Served:
    """One consumer incarnation, as this producer serves it."""

    consumer: ConsumerId
    incarnation: bytes
    wire_name: str
    ring: ServeRing
