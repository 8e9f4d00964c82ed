"""Chunk tables: what a producer must know of one consumer's plan, and its checks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_plan.chunks import ServeChunk
from rdt_plan.digest import is_digest
from rdt_plan.direct import is_run
from rdt_plan.errors import ManifestError, PlanError, SliceError
from rdt_plan.groups import rank_schedule
from rdt_plan.identity import ConsumerId
from rdt_plan.layout import align, pack_layout
from rdt_plan.slices import check_bounds

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest

__all__ = ["ChunkTable", "check_table", "slot_bytes"]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The chunks of one consumer's plan that one owner serves.

    Attributes:
        consumer: whose plan it is.
        owner: producer rank that serves these chunks.
        plan_digest: digest of the whole plan.
        num_slots: serve slots of the ring.
        slot_bytes: bytes of one serve slot: those of the largest chunk that takes one, up to a
            multiple of 16; 0 when none does.
        chunks: by seq.
    """

    consumer: ConsumerId
    owner: int
    plan_digest: str
    num_slots: int
    slot_bytes: int
    chunks: tuple[ServeChunk, ...]


def slot_bytes(chunks: Iterable[ServeChunk]) -> int:
    """Bytes of the slots that carry ``chunks``: 0 when all of them are direct."""
    return align(max((chunk.num_bytes for chunk in chunks if not chunk.is_direct), default=0))


def check_table(
    table: ChunkTable, manifest: "Manifest", rank: int, sources: Collection[str] = frozenset()
) -> None:
    """Refuse a table that the producer of ``rank`` cannot serve, before anything is allocated.

    Args:
        table: a stranger's word.
        manifest: the job's.
        rank: the producer's.
        sources: the names that it has declared as sources: all that direct chunks may read.

    Raises:
        PlanError: the table is another rank's, names what the rank does not hold or declare,
            leaves the group schedule, or its seqs, slots, offsets or sizes are not what the plan
            rules give.
        SliceError: a slice is not canonical or leaves its tensor.
    """
    try:
        _check_rows(table, manifest, rank, sources)
    except (PlanError, SliceError) as error:
        raise type(error)(
            f"{error}; build the plan from the manifest and the settings of the job, with one "
            "release of rdt-plan on both sides"
        ) from None


def _check_rows(
    table: ChunkTable, manifest: "Manifest", rank: int, sources: Collection[str]
) -> None:
    where = f"chunk table of {table.consumer} for rank {table.owner}"
    if table.owner != rank:
        raise PlanError(f"{where}: expected a table for rank {rank}")
    if not is_digest(table.plan_digest):
        raise PlanError(
            f"{where}: expected the plan's digest, 64 lower-case hexadecimal digits, found "
            f"{table.plan_digest[:80]!r}"
        )
    if table.num_slots < 1:
        raise PlanError(f"{where}: expected at least 1 slot, found {table.num_slots}")
    positions = {group: at for at, group in enumerate(rank_schedule(manifest, rank))}
    previous = -1
    num_slotted = 0
    for seq, chunk in enumerate(table.chunks):
        here = f"{where}, chunk {chunk.seq}"
        if chunk.seq != seq:
            raise PlanError(f"{here}: expected seq {seq}: seqs count up from 0 without repeats")
        if not chunk.is_direct:
            if chunk.serve_slot != num_slotted % table.num_slots:
                raise PlanError(
                    f"{here}: expected serve slot {num_slotted % table.num_slots}, found "
                    f"{chunk.serve_slot}"
                )
            num_slotted += 1
        position = positions.get(chunk.group)
        if position is None:
            raise PlanError(f"{here}: rank {rank} holds nothing of gather group {chunk.group}")
        if position < previous:
            raise PlanError(
                f"{here}: expected gather groups in schedule order, found group {chunk.group} late"
            )
        previous = position
        _check_slices(chunk, manifest, rank, here)
        if chunk.is_direct:
            _check_direct(chunk, sources, here)
        else:
            _check_packed(chunk, here)
    expected = slot_bytes(table.chunks)
    if table.slot_bytes != expected:  # the producer allocates what this says
        raise PlanError(
            f"{where}: expected slot_bytes={expected}, what its largest chunk needs, found "
            f"slot_bytes={table.slot_bytes}"
        )


def _check_slices(chunk: ServeChunk, manifest: "Manifest", rank: int, here: str) -> None:
    for slice_ in chunk.slices:
        try:
            param = manifest.param(slice_.name)
        except ManifestError as error:
            raise PlanError(f"{here}: {error}") from None
        held = param.held_by(rank)
        if held is None:
            raise PlanError(
                f"{here}: {slice_.name!r} is held by ranks {param.holders}, not by rank {rank}"
            )
        if manifest.group_of(slice_.name) != chunk.group:
            raise PlanError(
                f"{here}: expected names of gather group {chunk.group}, found {slice_.name!r} "
                f"of group {manifest.group_of(slice_.name)}"
            )
        try:
            check_bounds(slice_, held)
        except SliceError as error:
            raise SliceError(f"{here}: {error}") from None
    if len(set(chunk.slices)) < len(chunk.slices):  # a ring is as large as its chunks say
        raise PlanError(f"{here}: expected each slice once, found one twice in {chunk.tensors}")


def _check_direct(chunk: ServeChunk, sources: Collection[str], here: str) -> None:
    for slice_ in chunk.slices:
        if slice_.name not in sources:
            raise PlanError(
                f"{here}: expected a direct chunk of declared sources only, found {slice_.name!r}"
            )
        if not is_run(slice_):
            raise PlanError(f"{here}: expected direct slices of one run of bytes, found {slice_}")
    num_bytes = sum(slice_.num_bytes for slice_ in chunk.slices)
    if num_bytes == 0 or chunk.offsets or chunk.num_bytes != num_bytes:
        raise PlanError(
            f"{here}: expected a direct chunk of at least 1 byte, with offsets=() and "
            f"num_bytes={num_bytes}, found offsets={chunk.offsets} num_bytes={chunk.num_bytes}"
        )


def _check_packed(chunk: ServeChunk, here: str) -> None:
    layout = pack_layout(chunk.slices)
    if layout.num_bytes == 0:
        raise PlanError(f"{here}: expected a chunk of at least 1 byte, found an empty one")
    if chunk.offsets != layout.offsets or chunk.num_bytes != layout.num_bytes:
        raise PlanError(
            f"{here}: expected the pack layout offsets={layout.offsets} "
            f"num_bytes={layout.num_bytes}, found offsets={chunk.offsets} "
            f"num_bytes={chunk.num_bytes}"
        )
