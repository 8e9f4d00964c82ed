"""JSON forms of what crosses the wire; their digests are taken over the same forms.

Rows are arrays, not objects: a table may hold tens of thousands of slices. `rdt_plan._decoding`
reads what is written here.
"""

from typing import TYPE_CHECKING, Any

from rdt_plan._program_form import program_form
from rdt_plan._slice_form import slice_form

if TYPE_CHECKING:
    from rdt_plan.chunks import Chunk, ServeChunk
    from rdt_plan.identity import ConsumerId
    from rdt_plan.manifest import Manifest
    from rdt_plan.placement import Fill, Placement
    from rdt_plan.plan import SyncPlan
    from rdt_plan.slices import Slice
    from rdt_plan.table import ChunkTable

__all__ = ["consumer_form", "manifest_form", "plan_form", "table_form"]


def manifest_form(manifest: "Manifest") -> dict[str, Any]:
    """``groups`` is [key, number of names] in order: a check that both sides cut alike."""
    return {
        "params": [
            (p.name, p.dtype, p.shape, p.owners, p.mesh_shape, p.placements)
            for p in manifest.params
        ],
        "groups": [(group.key, len(group.names)) for group in manifest.groups],
    }


def consumer_form(consumer: "ConsumerId") -> tuple[int, int]:
    return (consumer.replica, consumer.worker)


def _serve_form(chunk: "ServeChunk") -> tuple[Any, ...]:
    return (
        chunk.seq,
        chunk.group,
        chunk.serve_slot,
        chunk.num_bytes,
        [slice_form(s) for s in chunk.slices],
        chunk.offsets,
    )


def table_form(table: "ChunkTable") -> dict[str, Any]:
    """Everything but the consumer: equal workers of two replicas send equal tables."""
    return {
        "owner": table.owner,
        "plan_digest": table.plan_digest,
        "num_slots": table.num_slots,
        "slot_bytes": table.slot_bytes,
        "chunks": [_serve_form(chunk) for chunk in table.chunks],
    }


def _placement_form(placement: "Placement", index_of: dict["Slice", int]) -> tuple[Any, ...]:
    return (
        index_of[placement.slice],
        placement.module,
        placement.param,
        placement.offset,
        placement.shape,
        placement.stride,
        placement.dtype,
        placement.source_stride,
    )


def _fill_form(fill: "Fill") -> tuple[Any, ...]:
    """Floats are spelled in hexadecimal, so that they are exact and may be infinite or NaN."""
    value = float(fill.value).hex() if isinstance(fill.value, float) else fill.value
    return (fill.module, fill.param, fill.offset, fill.shape, fill.stride, fill.dtype, value)


def _chunk_form(chunk: "Chunk") -> tuple[Any, ...]:
    index_of = {slice_: index for index, slice_ in enumerate(chunk.serve.slices)}
    return (
        chunk.index,
        chunk.owner,
        _serve_form(chunk.serve),
        chunk.receive_slot,
        [_placement_form(placement, index_of) for placement in chunk.placements],
        chunk.materialize,
        chunk.complete,
    )


def plan_form(plan: "SyncPlan") -> dict[str, Any]:
    """Everything but the consumer: equal workers of two replicas hold equal plans."""
    return {
        "manifest_digest": plan.manifest_digest,
        "schedule": plan.schedule,
        "num_slots": plan.num_slots,
        "max_chunk_bytes": plan.max_chunk_bytes,
        "chunks": [_chunk_form(chunk) for chunk in plan.chunks],
        "fills": [_fill_form(fill) for fill in plan.fills],
        "modules_without_chunks": plan.modules_without_chunks,
        "programs": [program_form(program) for program in plan.programs],
    }
