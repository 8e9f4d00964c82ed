"""Streams: what one consumer reads from whom, checked, routed and cut at borders of boxes."""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from rdt_plan.cutting import Piece
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, PlanError
from rdt_plan.mesh import Cell
from rdt_plan.placement import Fill, Placement, Write, check_write, new_placement
from rdt_plan.routing import Router
from rdt_plan.shards import Share, pieces_of, shares_of
from rdt_plan.slices import Slice, check_bounds, last_element, new_slice

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest, ParamMeta

__all__ = ["streams_of"]

Strides = tuple[int, ...]


class _Reads(NamedTuple):
    """Slices in first-use order with the copies made from each: equal slices are one.

    Attributes:
        held: of names that are held whole, by gather group and owner.
        sharded: of all others.
        kinds: by slice of those, in order: equal for equal slices and first copies, whatever their
            names, offsets and destinations.
    """

    held: dict[tuple[int, int], dict[Slice, tuple[Placement, ...]]]
    sharded: dict[Slice, tuple[Placement, ...]]
    kinds: list[int]


def streams_of(
    manifest: "Manifest", writes: Iterable[Write], worker: int, num_workers: int
) -> dict[int, dict[int, list[Piece]]]:
    """The slices that move bytes and the copies made from each, by gather group and owner.

    In first-use order, and equal slices are one. A slice of a sharded name is cut at the borders of
    the boxes with all its placements, before pieces are compared, so that what two slices share is
    read once; such pieces follow the slices of names that are held whole.

    Raises:
        PlanError: a name that is not in the manifest, or a write that contradicts itself.
        SliceError: a slice that leaves its tensor, or whose elements a border cuts.
        RoutingError: a worker that does not exist.
    """
    router = Router(manifest.ownership, num_workers)
    router.check_worker(worker)

    def owner(owner_set: int, group: int) -> int:
        return router.producer(owner_set, worker, group)

    reads = _reads(manifest, writes, owner)
    streams: dict[int, dict[int, list[Piece]]] = {}
    for (group, rank), slices in reads.held.items():
        streams.setdefault(group, {})[rank] = list(slices.items())
    _cut(manifest, reads, owner, streams)
    read = {group: {r: s for r, s in of.items() if s} for group, of in streams.items()}
    return {group: of for group, of in read.items() if of}


def _reads(
    manifest: "Manifest", writes: Iterable[Write], owner: Callable[[int, int], int]
) -> _Reads:
    reads = held, sharded, first_kinds = _Reads({}, {}, [])
    routes: dict[tuple[int, int], dict[Slice, tuple[Placement, ...]]] = {}
    set_by_name = manifest.ownership.set_by_name
    # One turn for each of a model's writes: what this loop does is what a plan takes. The layers of
    # a model are alike: what differs in names and offsets only is checked once.
    params, groups = manifest.by_name, manifest.group_by_name
    kinds: dict[object, tuple[int, int]] = {}  # room, and number
    for write in writes:
        if isinstance(write, Fill):
            check_write(write)
            continue
        slice_, _, _, at, copied, steps, copied_dtype, source_steps = write
        name, dtype, offset, shape, stride = slice_
        meta = params.get(name) or _missing(manifest, write)
        of = meta.dtype, meta.shape, meta.mesh_shape, meta.placements
        kind = (*of, dtype, copied_dtype, shape, stride, copied, steps, source_steps)
        known = kinds.get(kind)
        if known is None:
            known = kinds[kind] = _room(write, meta), len(kinds)
        room, number = known
        if not 0 <= offset <= room or at < 0:
            check_write(write)
            check_bounds(slice_, meta)
            continue  # a copy of no elements: its module may end up without chunks
        owner_set = set_by_name.get(name)
        if owner_set is None:
            slices = sharded
        else:
            route = owner_set, groups[name]
            slices = routes.get(route)
            if slices is None:
                slices = routes[route] = held.setdefault((route[1], owner(*route)), {})
        first = (write,)
        copies = slices.setdefault(slice_, first)
        if copies is not first:
            slices[slice_] = (*copies, write)
        elif owner_set is None:
            first_kinds.append(number)
    return reads


_Cut = tuple[Cell, int, Strides, Strides, int, Strides, Strides, Strides]
"""A piece of a slice that has one copy, and the one copy that is made of it: a plain tuple.

Its cell, offset, shape and stride; how much further the copy lands; its shape, stride and source
stride.
"""


def _cut_of(share: Share) -> _Cut:
    cell, region, ((_, twin, copied, source_steps, steps),) = share
    return (cell, *region, twin, copied, steps, source_steps)


def _cut(
    manifest: "Manifest",
    reads: _Reads,
    owner: Callable[[int, int], int],
    streams: dict[int, dict[int, list[Piece]]],
) -> None:
    """Cut what is sharded, into ``streams``; what differs in names and destinations only, once."""
    params, groups = manifest.by_name, manifest.group_by_name
    sets_by_cell = manifest.ownership.sets_by_cell
    num_slices = Counter(map(itemgetter(0), reads.sharded))  # of each name
    alike: dict[tuple[int, int], list[_Cut]] = {}
    routes: dict[tuple[int, int], dict[Cell, list[Piece]]] = {}  # of names that have equal boxes
    places: dict[tuple[int, Slice], int] = {}  # of pieces of names that have several slices
    for (slice_, copies), kind in zip(reads.sharded.items(), reads.kinds, strict=True):
        name, dtype, offset, _, _ = slice_
        group, sets = groups[name], sets_by_cell[name]
        route = routes.get((id(sets), group))
        if route is None:
            opened, route = streams.setdefault(group, {}), {}
            for cell, owner_set in sets.items():
                route[cell] = opened.setdefault(owner(owner_set, group), [])
            routes[id(sets), group] = route
        is_alone = len(copies) == num_slices[name] == 1
        cuts = alike.get((kind, offset)) if is_alone else None
        if cuts is None:
            shares = shares_of(slice_, copies, params[name])
            if not is_alone or any(len(share.copies) > 1 for share in shares):
                for cell, (piece, parts) in pieces_of(slice_, copies, shares):
                    stream = route[cell]
                    at = places.setdefault((id(stream), piece), len(stream))
                    if at == len(stream):
                        stream.append((piece, parts))
                    else:
                        stream[at] = piece, stream[at][1] + parts
                continue
            cuts = alike[kind, offset] = list(map(_cut_of, shares))
        _, module, param, at, _, _, copied_dtype, _ = copies[0]
        for cell, start, shape, stride, twin, copied, steps, source_steps in cuts:
            piece = new_slice((name, dtype, start, shape, stride))
            copy = (piece, module, param, at + twin, copied, steps, copied_dtype, source_steps)
            route[cell].append((piece, (new_placement(copy),)))


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
