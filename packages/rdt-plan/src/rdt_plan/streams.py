"""Streams: what one consumer reads from whom, checked, routed and cut at borders of boxes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from rdt_plan.cutting import Piece
from rdt_plan.direct import DirectRule, Stream, lands_as_run
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, PlanError
from rdt_plan.mesh import Cell
from rdt_plan.placement import Fill, Placement, Write, check_write, new_placement
from rdt_plan.routing import Router
from rdt_plan.shards import Share, cut_at_borders, pieces_of, shares_of
from rdt_plan.slices import Slice, check_bounds, last_element, new_slice

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest, ParamMeta

__all__ = ["streams_of"]

Strides = tuple[int, ...]
Streams = Mapping[int, dict[int, Stream]]
Owner = Callable[[int, int], int]
"""The rank that serves an owner set's part of a gather group."""

_NOTHING: frozenset[str] = frozenset()


class _Reads(NamedTuple):
    """Slices in first-use order with the copies made from each: equal slices are one.

    Attributes:
        held: of names that are held whole, by gather group and owner.
        sharded: of all others.
        kinds: by slice of those, in order: equal for equal slices and first copies of what is held
            alike, whatever their names, offsets and destinations; and how the name is held.
    """

    held: dict[tuple[int, int], dict[Slice, tuple[Placement, ...]]]
    sharded: dict[Slice, tuple[Placement, ...]]
    kinds: list[tuple[int, "ParamMeta", Mapping[Cell, int]]]


def streams_of(
    manifest: "Manifest",
    writes: Iterable[Write],
    worker: int,
    num_workers: int,
    rule: DirectRule,
) -> Streams:
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

    @cache
    def owner(owner_set: int, group: int) -> int:
        return router.producer(owner_set, worker, group)

    reads = _reads(manifest, writes, owner)
    streams: Streams = defaultdict(lambda: defaultdict(lambda: Stream([], [])))
    for (group, rank), slices in reads.held.items():
        streams[group][rank] = rule.split(rank, list(slices.items()))
    _cut(manifest, reads, owner, rule, streams)
    return streams


def _reads(manifest: "Manifest", writes: Iterable[Write], owner: Owner) -> _Reads:
    reads = held, sharded, kinds_of = _Reads({}, {}, [])
    routes: dict[tuple[int, int], dict[Slice, tuple[Placement, ...]]] = {}
    ownership = manifest.ownership
    set_by_name, sets_by_cell = ownership.set_by_name, ownership.sets_by_cell
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
        sets = sets_by_cell.get(name)
        like = meta.shape if sets is None else id(sets)  # equal for equal shapes, meshes and owners
        kind = (like, meta.dtype, dtype, shape, stride, copied_dtype, copied, steps, source_steps)
        known = kinds.get(kind)
        if known is None:
            known = kinds[kind] = _room(write, meta), len(kinds)
        room, number = known
        if not 0 <= offset <= room or at < 0:
            check_write(write)
            check_bounds(slice_, meta)
            continue  # a copy of no elements: its module may end up without chunks
        if sets is None:
            route = set_by_name[name], groups[name]
            slices = routes.get(route)
            if slices is None:
                slices = routes[route] = held.setdefault((route[1], owner(*route)), {})
        else:
            slices = sharded
        first = (write,)
        copies = slices.setdefault(slice_, first)
        if copies is not first:
            slices[slice_] = (*copies, write)
        elif sets is not None:
            kinds_of.append((number, meta, sets))
    return reads


_Cut = tuple[
    list[Placement],
    list[Piece],
    Set[str],
    int,
    tuple[int, ...],
    Strides,
    int,
    tuple[int, ...],
    Strides,
    Strides,
]
"""A piece of all slices that are cut alike and have one copy, and where it goes: a plain tuple.

The two lists of its owner's stream, and the names of which it is direct; its offset, shape and
stride; how much further the copy lands; its shape, stride and source stride.
"""


def _cut(
    manifest: "Manifest", reads: _Reads, owner: Owner, rule: DirectRule, streams: Streams
) -> None:
    """Cut what is sharded, into ``streams``; what differs in names and destinations only, once."""
    groups, live = manifest.group_by_name, rule.destinations
    shared = _shared(manifest, reads.sharded)
    alike: dict[object, list[_Cut]] = {}
    of_slices = zip(reads.sharded.items(), reads.kinds, strict=True)
    for (slice_, copies), (kind, meta, sets) in of_slices:
        name, dtype, offset = meta.name, slice_[1], slice_[2]
        _, module, param, at, _, _, copied_dtype, _ = copies[0]
        group = groups[name]
        key = kind, offset, group, (module, param) in live
        pieces = shared[name][slice_] if name in shared else ()
        cuts = () if name in shared else alike.get(key)
        if cuts is None:
            shares = shares_of(slice_, copies, meta)
            if all(len(share.copies) == 1 for share in shares):
                ranks = [owner(sets[share.cell], group) for share in shares]
                cuts = alike[key] = [
                    _cut_of(share, copies[0], rank, rule, streams[group][rank])
                    for share, rank in zip(shares, ranks, strict=True)
                ]
            else:
                cuts, pieces = (), pieces_of(slice_, copies, shares)
        for cell, piece in pieces:
            rank = owner(sets[cell], group)
            streams[group][rank].add(piece, rule.as_run(rank, piece))
        for cut in cuts:  # one turn for each piece of a plan: two objects, and hardly anything else
            direct, rest, names, start, shape, stride, twin, copied, steps, source_steps = cut
            piece = new_slice((name, dtype, start, shape, stride))
            if name in names:
                run = (piece, module, param, at + twin, shape, stride, dtype, stride)
                direct.append(new_placement(run))
            else:
                copy = (piece, module, param, at + twin, copied, steps, copied_dtype, source_steps)
                rest.append((piece, (new_placement(copy),)))


def _cut_of(share: Share, copy: Placement, rank: int, rule: DirectRule, stream: Stream) -> _Cut:
    _, region, ((_, twin, copied, source_steps, steps),) = share
    _, shape, stride = region
    names = rule.sources.get(rank, _NOTHING)
    if (copy.module, copy.param) not in rule.destinations or copy.dtype != copy.slice.dtype:
        names = _NOTHING
    elif not lands_as_run(shape, stride, copied, source_steps, steps):
        names = _NOTHING
    return (*stream, names, *region, twin, copied, steps, source_steps)


def _shared(
    manifest: "Manifest", sharded: dict[Slice, tuple[Placement, ...]]
) -> dict[str, dict[Slice, list[tuple[Cell, Piece]]]]:
    """Names of which a slice has several copies, or that have several slices, which may overlap.

    By slice: the pieces that no slice before it reads, each with the copies of all slices.
    """
    num_slices = Counter(map(itemgetter(0), sharded))
    shared: dict[str, dict[Slice, list[tuple[Cell, Piece]]]] = {}
    first: dict[tuple[Cell, Slice], tuple[list[tuple[Cell, Piece]], int]] = {}
    for slice_, copies in sharded.items():
        name = slice_[0]
        if len(copies) == num_slices[name] == 1:
            continue
        pieces: list[tuple[Cell, Piece]] = []
        for cell, (piece, parts) in cut_at_borders(slice_, copies, manifest.param(name)):
            of, at = first.setdefault((cell, piece), (pieces, len(pieces)))
            if of is pieces and at == len(pieces):
                pieces.append((cell, (piece, parts)))
            else:
                of[at] = cell, (piece, of[at][1][1] + parts)
        shared.setdefault(name, {})[slice_] = pieces
    return shared


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
