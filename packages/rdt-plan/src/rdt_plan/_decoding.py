"""Reading the JSON forms that `rdt_plan._encoding` writes; nothing is taken on trust."""

from collections.abc import Sequence
from typing import Any

from rdt_plan._fields import (
    array,
    digest,
    fields,
    float_of,
    integer,
    integers,
    positive,
    rows,
    string,
    strings,
)
from rdt_plan._program_form import program_of
from rdt_plan._slice_form import slice_of
from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.errors import ManifestError, OwnershipError, PlanError, WireFormatError
from rdt_plan.identity import ConsumerId
from rdt_plan.manifest import Manifest, ParamMeta
from rdt_plan.placement import Fill, Placement, Write, check_write
from rdt_plan.plan import SyncPlan
from rdt_plan.slices import Slice

__all__ = ["consumer_of", "manifest_of", "names_of", "plan_of"]

_MANIFEST = frozenset({"params", "groups"})
_PLAN = frozenset(
    {
        "consumer",
        "manifest_digest",
        "schedule",
        "num_slots",
        "max_chunk_bytes",
        "chunks",
        "fills",
        "modules_without_chunks",
        "programs",
    }
)


def manifest_of(form: Any) -> Manifest:
    form = fields(form, "manifest", _MANIFEST)
    params = rows(form["params"], "params", _param_of)
    try:
        manifest = Manifest.build(params)
    except (ManifestError, OwnershipError) as error:
        raise WireFormatError(f"manifest: {error}") from error
    found = rows(form["groups"], "groups", _group_of)
    expected = tuple((group.key, len(group.names)) for group in manifest.groups)
    if found != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
            min(len(found), len(expected)),
        )
        raise WireFormatError(
            f"groups: the sender cuts gather groups differently from group {at} on: expected "
            f"{expected[at : at + 1]}, found {found[at : at + 1]}; upgrade the older side"
        )
    return manifest


def names_of(form: Any) -> tuple[str, ...]:
    """Those of a manifest's form."""
    form = fields(form, "manifest", _MANIFEST)
    return rows(form["params"], "params", lambda row: string(array(row, "param", 6)[0], "name"))


def _param_of(row: Any) -> ParamMeta:
    name, dtype, shape, owners, mesh_shape, placements = array(row, "param", 6)
    return ParamMeta(
        name=string(name, "name"),
        dtype=string(dtype, "dtype"),
        shape=integers(shape, "shape"),
        owners=integers(owners, "owners"),
        mesh_shape=integers(mesh_shape, "mesh_shape"),
        placements=strings(placements, "placements"),
    )


def _group_of(row: Any) -> tuple[str, int]:
    key, num_names = array(row, "group", 2)
    return string(key, "key"), integer(num_names, "num_names")


def consumer_of(form: Any) -> ConsumerId:
    replica, worker = array(form, "consumer", 2)
    return ConsumerId(integer(replica, "replica"), integer(worker, "worker"))


def _serve_of(row: Any) -> ServeChunk:
    seq, group, serve_slot, num_bytes, slices, offsets = array(row, "chunk", 6)
    slot = None if serve_slot is None else integer(serve_slot, "serve_slot")
    chunk = ServeChunk(
        seq=integer(seq, "seq"),
        group=integer(group, "group"),
        serve_slot=slot,
        num_bytes=integer(num_bytes, "num_bytes"),
        slices=rows(slices, "slices", slice_of),
        offsets=integers(offsets, "offsets"),
    )
    if len(chunk.offsets) != (0 if chunk.is_direct else len(chunk.slices)):
        expected = "none without a slot" if chunk.is_direct else f"one a slice ({len(slices)})"
        raise WireFormatError(f"offsets: expected {expected}, found {len(chunk.offsets)}")
    return chunk


def plan_of(form: Any) -> SyncPlan:
    form = fields(form, "sync_plan", _PLAN)
    plan = SyncPlan(
        consumer=consumer_of(form["consumer"]),
        manifest_digest=digest(form["manifest_digest"], "manifest_digest"),
        schedule=integers(form["schedule"], "schedule"),
        num_slots=positive(form["num_slots"], "num_slots"),
        max_chunk_bytes=positive(form["max_chunk_bytes"], "max_chunk_bytes"),
        chunks=rows(form["chunks"], "chunks", _chunk_of),
        fills=rows(form["fills"], "fills", _fill_of),
        modules_without_chunks=strings(form["modules_without_chunks"], "modules_without_chunks"),
        programs=rows(form["programs"], "programs", program_of),
    )
    if len({program.module for program in plan.programs}) != len(plan.programs):
        raise WireFormatError("programs: expected at most one a module")
    if sorted(plan.schedule) != list(range(len(plan.schedule))):
        raise WireFormatError("schedule: expected a permutation of all gather groups")
    return plan


def _chunk_of(row: Any) -> Chunk:
    index, owner, serve, receive_slot, placements, materialize, complete = array(row, "chunk", 7)
    chunk = _serve_of(serve)
    slot = None if receive_slot is None else integer(receive_slot, "receive_slot")
    if chunk.is_direct is not (slot is None):
        raise WireFormatError(
            "receive_slot: expected null where serve_slot is null, and only there"
        )
    return Chunk(
        index=integer(index, "index"),
        owner=integer(owner, "owner"),
        serve=chunk,
        receive_slot=slot,
        placements=rows(placements, "placements", lambda row: _placement_of(row, chunk.slices)),
        materialize=strings(materialize, "materialize"),
        complete=strings(complete, "complete"),
    )


def _placement_of(row: Any, slices: Sequence[Slice]) -> Placement:
    number, module, param, offset, shape, stride, dtype, source_stride = array(row, "placement", 8)
    if integer(number, "slice") >= len(slices):
        raise WireFormatError(f"slice: expected an index below {len(slices)}, found {number}")
    placement = Placement(
        slice=slices[number],
        module=string(module, "module"),
        param=string(param, "param"),
        offset=integer(offset, "offset"),
        shape=integers(shape, "shape"),
        stride=integers(stride, "stride"),
        dtype=string(dtype, "dtype"),
        source_stride=integers(source_stride, "source_stride"),
    )
    _check_write(placement)
    return placement


def _fill_of(row: Any) -> Fill:
    module, param, offset, shape, stride, dtype, value = array(row, "fill", 7)
    fill = Fill(
        module=string(module, "module"),
        param=string(param, "param"),
        offset=integer(offset, "offset"),
        shape=integers(shape, "shape"),
        stride=integers(stride, "stride"),
        dtype=string(dtype, "dtype"),
        value=_fill_value_of(value),
    )
    _check_write(fill)
    return fill


def _fill_value_of(value: Any) -> bool | int | float:
    if type(value) is bool or type(value) is int:
        return value
    return float_of(value, "value")


def _check_write(write: Write) -> None:
    try:
        check_write(write)
    except PlanError as error:
        raise WireFormatError(str(error)) from error
