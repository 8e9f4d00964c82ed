"""Streams: what is cut once for all layers is, slice for slice, what each name by itself gives."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import DirectRule, Fill, Manifest, ParamMeta, Placement, Slice, whole
from rdt_plan.cutting import Piece
from rdt_plan.direct import Stream
from rdt_plan.routing import Router
from rdt_plan.shards import cut_at_borders
from rdt_plan.slices import last_element
from rdt_plan.streams import streams_of
from rdt_plan.testing import direct_rules, elements, manifests, writes

Streams = dict[int, dict[int, Stream]]


def plain(manifest: Manifest, drawn, worker: int, num_workers: int, rule: DirectRule) -> Streams:
    """One slice at a time, by the rules of `streams_of` alone."""
    router = Router(manifest.ownership, num_workers)
    copies: dict[Slice, list[Placement]] = {}
    for write in drawn:
        if isinstance(write, Placement) and 0 not in (*write.shape, *write.slice.shape):
            copies.setdefault(write.slice, []).append(write)
    streams: dict[tuple[int, int], dict[Slice, tuple[Placement, ...]]] = {}
    for is_sharded in (False, True):
        for slice_, of in copies.items():
            meta = manifest.param(slice_.name)
            if bool(meta.mesh_shape) is not is_sharded:
                continue
            pieces = [((), (slice_, tuple(of)))]
            if is_sharded:
                pieces = cut_at_borders(slice_, of, meta)
            group = manifest.group_of(meta.name)
            for cell, (piece, parts) in pieces:
                cells = manifest.ownership.sets_by_cell.get(meta.name)
                owner_set = cells[cell] if cells else manifest.ownership.set_of(meta.name)
                owner = router.producer(owner_set, worker, group)
                stream = streams.setdefault((group, owner), {})
                stream[piece] = stream.get(piece, ()) + parts
    found: Streams = {}
    for (group, owner), stream in streams.items():
        pieces = list(stream.items())
        stream_of = found.setdefault(group, {})[owner] = Stream([], [])
        for piece in pieces:
            if is_direct(owner, piece, rule):
                slice_, (copy,) = piece
                run = copy._replace(
                    shape=slice_.shape, stride=slice_.stride, source_stride=slice_.stride
                )
                stream_of.direct.append(run)
            else:
                stream_of.rest.append(piece)
    return found


def is_direct(owner: int, piece: Piece, rule: DirectRule) -> bool:
    """By the elements: one copy, of a declared name into a live tensor, of one run to another."""
    slice_, (copy, *others) = piece
    if others or copy.dtype != slice_.dtype or (copy.module, copy.param) not in rule.destinations:
        return False
    every = list(range(slice_.numel))
    return slice_.name in rule.sources.get(owner, ()) and all(
        list(elements(0, shape, stride)) == every
        for shape, stride in (
            (slice_.shape, slice_.stride),
            (copy.shape, copy.stride),
            (copy.shape, copy.source_stride),
        )
    )


@st.composite
def layered(draw: st.DrawFn):
    """A manifest and writes, repeated over layers: with other owners, names and offsets."""
    manifest = draw(manifests(max_layers=1))
    drawn = draw(writes(manifest, min_writes=1))
    params, everything = [], []
    for layer in range(draw(st.integers(1, 3))):
        for param in manifest.params:
            owners = tuple(owner + layer for owner in param.owners)
            params.append(replace(param, name=f"all.{layer}.{param.name}", owners=owners))
        for write in drawn:
            module = f"{layer}.{write.module}"
            if isinstance(write, Fill):
                everything.append(replace(write, module=module))
                continue
            _, dtype, offset, shape, stride = write.slice
            of = manifest.param(write.slice.name)
            end = (last_element(offset, shape, stride) + 1) * Slice("", dtype, 0, (), ()).num_bytes
            if 0 not in shape and end < of.num_bytes and draw(st.booleans()):
                room = (of.num_bytes - end) // Slice("", dtype, 0, (), ()).num_bytes
                offset += draw(st.integers(0, room))
            slice_ = Slice(f"all.{layer}.{of.name}", dtype, offset, shape, stride)
            at = write.offset + draw(st.integers(0, 2))
            everything.append(write._replace(slice=slice_, module=module, offset=at))
    return Manifest.build(params), everything


@settings(max_examples=50)
@given(layered(), st.integers(1, 3), st.data())
def test_streams_are_what_each_name_gives_by_itself(case, num_workers: int, data) -> None:
    manifest, drawn = case
    worker = data.draw(st.integers(0, num_workers - 1))
    rule = data.draw(direct_rules(manifest, drawn))
    assert streams_of(manifest, drawn, worker, num_workers, rule) == plain(
        manifest, drawn, worker, num_workers, rule
    )


def test_what_is_cut_alike_is_direct_name_by_name() -> None:
    """One shape, one mesh, one group; they differ in who declares them, and in where they land."""
    params = [
        ParamMeta(f"l.0.{name}", "int8", (4,), (0, 1), (2,), ("shard(0)",)) for name in "abcd"
    ]
    drawn = [Placement(whole(p), "m", p.name[-1], 0, (4,), (1,), "int8", (1,)) for p in params]
    drawn[3] = drawn[3]._replace(dtype="uint8")
    names = frozenset(param.name for param in params)
    live = frozenset(("m", name) for name in "acd")
    rule = DirectRule({0: names - {"l.0.c"}, 1: names}, live)
    streams = streams_of(Manifest.build(params), drawn, 0, 1, rule)[0]
    found = {
        rank: ("".join(run.param for run in direct), "".join(of.name[-1] for of, _ in rest))
        for rank, (direct, rest) in streams.items()
    }
    assert found == {0: ("a", "bcd"), 1: ("ac", "bd")}
