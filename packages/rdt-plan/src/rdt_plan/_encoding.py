"""JSON forms of manifests and plans; a manifest's digest is taken over its form.

Rows are arrays, not objects. `rdt_plan._decoding` reads what is written here; chunk tables are
`rdt_plan._table_form`'s.
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

__all__ = ["consumer_form", "manifest_form", "plan_form", "plan_head"]


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
    """Everything but the consumer."""
    return {**plan_head(plan), "chunks": [_chunk_form(chunk) for chunk in plan.chunks]}


def plan_head(plan: "SyncPlan") -> dict[str, Any]:
    """All that `plan_form` says beside the chunks."""
    return {
        "manifest_digest": plan.manifest_digest,
        "schedule": plan.schedule,
        "num_slots": plan.num_slots,
        "max_chunk_bytes": plan.max_chunk_bytes,
        "fills": [_fill_form(fill) for fill in plan.fills],
        "modules_without_chunks": plan.modules_without_chunks,
        "programs": [program_form(program) for program in plan.programs],
    }
