"""Streams: what one consumer reads from whom, checked, routed and cut at borders of boxes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, PlanError
from rdt_plan.placement import Fill, Placement, Write, check_write
from rdt_plan.routing import Router
from rdt_plan.shards import cut_at_borders
from rdt_plan.slices import Slice, check_bounds, last_element

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest, ParamMeta

__all__ = ["Stream", "streams_of"]

Stream = dict[Slice, tuple[Placement, ...]]
"""Slices in first-use order, each with the copies made from it."""


def streams_of(
    manifest: "Manifest", writes: Iterable[Write], worker: int, num_workers: int
) -> dict[int, dict[int, Stream]]:
    """The slices and placements that move bytes, by gather group and owner.

    Equal slices are one. A slice of a sharded name is cut at the borders of the boxes with all
    its placements, before pieces are compared, so that what two slices share is read once; such
    pieces follow the slices of names that are held whole.

    Raises:
        PlanError: a name that is not in the manifest, or a write that contradicts itself.
        SliceError: a slice that leaves its tensor, or whose elements a border cuts.
        RoutingError: a worker that does not exist.
    """
    ownership = manifest.ownership
    router = Router(ownership, num_workers)
    router.check_worker(worker)
    streams: dict[int, dict[int, Stream]] = {}

    streams_by_route: dict[tuple[int, int], Stream] = {}

    def stream_of(owner_set: int, group: int) -> Stream:
        stream = streams_by_route.get((owner_set, group))
        if stream is None:
            owner = router.producer(owner_set, worker, group)
            stream = streams.setdefault(group, {}).setdefault(owner, {})
            streams_by_route[owner_set, group] = stream
        return stream

    # One turn for each of a model's writes: what this loop does is what a plan takes.
    params, groups, set_by_name = manifest.by_name, manifest.group_by_name, ownership.set_by_name
    rooms: dict[object, int] = {}
    sharded: Stream = {}
    for write in writes:
        if isinstance(write, Fill):
            check_write(write)
            continue
        slice_ = write.slice
        name, dtype, offset, shape, stride = slice_
        meta = params.get(name) or _missing(manifest, write)
        # The layers of a model are alike: writes that differ in names and offsets are checked once.
        kind = (
            meta.dtype,
            meta.shape,
            dtype,
            shape,
            stride,
            write.dtype,
            write.shape,
            write.stride,
            write.source_stride,
        )
        room = rooms.get(kind)
        if room is None:
            room = rooms[kind] = _room(write, meta)
        if not 0 <= offset <= room or write.offset < 0:
            check_write(write)
            check_bounds(slice_, meta)
            continue  # a copy of no elements: its module may end up without chunks
        owner_set = set_by_name.get(name)
        if owner_set is None:
            stream = sharded
        else:
            stream = stream_of(owner_set, groups[name])
        first = (write,)
        copies = stream.setdefault(slice_, first)
        if copies is not first:
            stream[slice_] = (*copies, write)
    for slice_, copies in sharded.items():
        name = slice_.name
        sets, group = ownership.sets_by_cell[name], groups[name]
        for cell, (piece, parts) in cut_at_borders(slice_, copies, params[name]):
            stream = stream_of(sets[cell], group)
            known = stream.setdefault(piece, parts)
            if known is not parts:
                stream[piece] = known + parts
    return streams


def _missing(manifest: "Manifest", write: Placement) -> NoReturn:
    try:
        manifest.param(write.slice.name)
    except ManifestError as error:
        raise PlanError(f"{write.module}.{write.param}: {error}") from None
    raise AssertionError(f"{write.slice.name!r} is in the manifest")


def _room(write: Placement, meta: "ParamMeta") -> int:
    """The highest offset a slice of this kind can have in ``meta``; -1 for copies of no elements.

    Raises what `check_write` and `check_bounds` raise.
    """
    check_write(write)
    check_bounds(write.slice, meta)
    if 0 in write.shape or 0 in write.slice.shape:
        return -1
    num_elements = meta.num_bytes // item_bytes(write.slice.dtype)
    return num_elements - 1 - last_element(0, write.slice.shape, write.slice.stride)
