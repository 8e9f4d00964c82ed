from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import (
    ALIGNMENT,
    Chunk,
    ConsumerId,
    Fill,
    Manifest,
    Ownership,
    ParamMeta,
    Placement,
    PlanError,
    Router,
    RoutingError,
    Slice,
    SliceError,
    SyncPlan,
    build_plan,
    check_table,
    contiguous_stride,
    group_schedule,
    item_bytes,
    pack_layout,
    rank_schedule,
    whole,
)
from rdt_plan.slices import last_element
from rdt_plan.testing import pack_slice, piece_bytes, place, plans, serve_chunk


def sources_of(manifest: Manifest) -> dict[str, bytes]:
    return {
        p.name: bytes((7 * number + i) % 251 + 1 for i in range(p.num_bytes))
        for number, p in enumerate(manifest.params)
    }


def blank(drawn) -> dict[tuple[str, str], bytearray]:
    """Zeroed destination tensors; no two writes share one."""
    tensors = {}
    for write in drawn:
        if isinstance(write, Placement) and 0 not in write.shape:
            num_items = last_element(write.offset, write.shape, write.stride) + 1
            tensors[write.module, write.param] = bytearray(num_items * item_bytes(write.dtype))
    return tensors


@given(plans(direct=True))
def test_following_the_plan_writes_what_the_loaders_write(case) -> None:
    manifest, drawn, _, plan = case
    sources = sources_of(manifest)
    expected = blank(drawn)
    for write in drawn:
        if isinstance(write, Placement) and 0 not in write.shape:
            packed = pack_slice(write.slice, sources[write.slice.name])
            place(write, packed, expected[write.module, write.param])

    found = blank(drawn)
    for chunk in plan.chunks:
        params = [manifest.param(slice_.name) for slice_ in chunk.serve.slices]
        held = {p.name: piece_bytes(p, chunk.owner, sources[p.name]) for p in params}
        if chunk.is_direct:
            for slice_, p in zip(chunk.serve.slices, chunk.placements, strict=True):
                item = item_bytes(p.dtype)
                at, start = p.offset * item, slice_.offset * item
                data = held[slice_.name][start : start + slice_.num_bytes]
                found[p.module, p.param][at : at + slice_.num_bytes] = data
            continue
        packed = serve_chunk(chunk.serve, held)
        offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for p in chunk.placements:
            start = offsets[p.slice]
            place(p, packed[start : start + p.slice.num_bytes], found[p.module, p.param])
    assert found == expected


@given(plans(direct=True))
def test_every_written_element_is_written_once(case) -> None:
    _, drawn, _, plan = case
    landed: dict[tuple[str, str], int] = defaultdict(int)
    for chunk in plan.chunks:
        for p in chunk.placements:
            landed[p.module, p.param] += prod(p.shape)
    assert landed == {
        (w.module, w.param): prod(w.shape)
        for w in drawn
        if isinstance(w, Placement) and 0 not in w.shape
    }
    assert plan.fills == tuple(w for w in drawn if isinstance(w, Fill))


def dealt_lanes(plan: SyncPlan, ownership: Ownership) -> dict[int, int]:
    """Of each owner: those are of one lane that serve one module, or names of one owner set."""
    found: list[tuple[set[int], set[object]]] = []  # owners, and what ties them
    for chunk in plan.chunks:
        if not chunk.is_direct:
            ties: set[object] = {p.module for p in chunk.placements}
            ties |= {ownership.set_by_name.get(s.name, s.name) for s in chunk.serve.slices}
            joined = [each for each in found if chunk.owner in each[0] or ties & each[1]]
            at = min([found.index(each) for each in joined], default=len(found))
            found = [each for each in found if each not in joined]
            owners = {chunk.owner}.union(*(each[0] for each in joined))
            found.insert(at, (owners, ties.union(*(each[1] for each in joined))))
    return {o: at % plan.num_slots for at, (owners, _) in enumerate(found) for o in owners}


@given(plans(direct=True))
def test_lanes_share_nothing(case) -> None:
    """Neither an owner, nor a module, nor a receive slot: none waits for another."""
    *_, plan = case
    lanes_by_tie: dict[object, set[int]] = defaultdict(set)
    for chunk in plan.chunks:
        if not chunk.is_direct:
            ties = [("slot", chunk.receive_slot), *(("module", p.module) for p in chunk.placements)]
            for tie in ties:
                lanes_by_tie[tie].add(plan.lanes[chunk.owner])
    assert all(len(lanes) == 1 for lanes in lanes_by_tie.values())


@given(plans(direct=True))
def test_numbers_follow_the_rules(case) -> None:
    manifest, _, num_workers, plan = case
    ownership = Ownership.of(manifest)
    router = Router(ownership, num_workers)
    position = {group: at for at, group in enumerate(plan.schedule)}
    assert plan.schedule == group_schedule(manifest)
    order = [(position[c.serve.group], c.owner, c.serve.seq) for c in plan.chunks]
    assert order == sorted(order)
    lanes = dealt_lanes(plan, ownership)
    seqs: dict[int, int] = defaultdict(int)
    slotted: list[Chunk] = []
    for index, chunk in enumerate(plan.chunks):
        assert chunk.index == index
        assert chunk.serve.seq == seqs[chunk.owner]
        seqs[chunk.owner] += 1
        if chunk.is_direct:
            assert (chunk.serve.serve_slot, chunk.serve.offsets) == (None, ())
            assert chunk.serve.num_bytes == sum(s.num_bytes for s in chunk.serve.slices) > 0
            at = (chunk.owner, chunk.serve.group)
            assert at not in [(each.owner, each.serve.group) for each in slotted]
        else:
            lane = lanes[chunk.owner]
            slots = range(lane, plan.num_slots, max(lanes.values()) + 1)
            num_received = sum(lanes[each.owner] == lane for each in slotted)
            assert chunk.receive_slot == slots[num_received % len(slots)]
            num_before = sum(each.owner == chunk.owner for each in slotted)
            assert chunk.serve.serve_slot == num_before % plan.num_slots
            slotted.append(chunk)
            layout = pack_layout(chunk.serve.slices)
            packed = (chunk.serve.offsets, chunk.serve.num_bytes)
            assert packed == (layout.offsets, layout.num_bytes)
            assert 0 < layout.num_bytes <= plan.receive_slot_bytes
            assert layout.num_bytes <= plan.max_chunk_bytes or len(chunk.serve.slices) == 1
        for slice_ in chunk.serve.slices:
            assert manifest.group_of(slice_.name) == chunk.serve.group
            meta = manifest.param(slice_.name)
            assert chunk.owner in meta.holders
            if meta.mesh_shape:
                box = meta.box(chunk.owner)
                peers = tuple(sorted(rank for rank in meta.owners if meta.box(rank) == box))
                owner_set = ownership.owner_sets.index(peers)
            else:
                owner_set = ownership.set_of(slice_.name)
            worker, group = plan.consumer.worker, chunk.serve.group
            assert router.producer(owner_set, worker, group) == chunk.owner
        assert {p.slice for p in chunk.placements} == set(chunk.serve.slices)


@given(plans(direct=True))
def test_every_module_is_materialised_first_and_completed_last(case) -> None:
    _, drawn, _, plan = case
    state: dict[str, str] = {}
    for chunk in plan.chunks:
        for module in chunk.materialize:
            assert module not in state
            state[module] = "open"
        assert all(state[p.module] == "open" for p in chunk.placements)
        for module in chunk.complete:
            assert state[module] == "open"
            state[module] = "complete"
    assert set(state.values()) <= {"complete"}
    assert plan.modules == (*state, *plan.modules_without_chunks)
    assert set(plan.modules) == {write.module for write in drawn}
    assert len(set(plan.modules)) == len(plan.modules)


@given(plans(direct=True))
def test_tables_are_the_plan_by_owner_and_pass_the_producers_check(case) -> None:
    manifest, _, _, plan = case
    assert plan.owners == tuple(sorted({chunk.owner for chunk in plan.chunks}))
    for owner in plan.owners:
        table = plan.table(owner)
        rows = [chunk.serve for chunk in plan.chunks if chunk.owner == owner]
        assert list(table.chunks) == rows
        assert (table.consumer, table.owner) == (plan.consumer, owner)
        assert (table.plan_digest, table.num_slots) == (plan.digest, plan.num_slots)
        largest = max((row.num_bytes for row in rows if not row.is_direct), default=0)
        assert largest <= table.slot_bytes < largest + ALIGNMENT
        read = {s.name for row in rows if row.is_direct for s in row.slices}
        check_table(table, manifest, owner, read)
        if read:
            with pytest.raises(PlanError, match="expected a direct chunk of declared sources only"):
                check_table(table, manifest, owner, read - {min(read)})


@given(plans(direct=True))
def test_sizes_add_up(case) -> None:
    _, drawn, _, plan = case
    copies = [w for w in drawn if isinstance(w, Placement) and 0 not in w.shape]
    assert plan.bytes_landed == sum(prod(w.shape) * item_bytes(w.dtype) for w in copies)
    # equal slices are pulled once, over meshes too, so no more than all distinct ones
    assert plan.slice_bytes <= sum(s.num_bytes for s in {w.slice for w in copies})
    padding = plan.bytes_pulled - plan.slice_bytes
    num_slices = sum(len(chunk.serve.slices) for chunk in plan.chunks)
    assert 0 <= padding <= ALIGNMENT * num_slices
    assert plan.receive_slot_bytes % ALIGNMENT == 0
    direct = [chunk for chunk in plan.chunks if chunk.is_direct]
    assert plan.direct_bytes == sum(s.num_bytes for chunk in direct for s in chunk.serve.slices)
    assert plan.direct_bytes + plan.staged_bytes == plan.bytes_pulled
    assert plan.max_unread == plan.num_slots + len(direct)


@given(plans())
def test_equal_inputs_give_equal_plans(case) -> None:
    manifest, drawn, num_workers, plan = case
    again = build_plan(
        Manifest.build(manifest.params),
        drawn,
        plan.consumer,
        num_workers=num_workers,
        num_slots=plan.num_slots,
        max_chunk_bytes=plan.max_chunk_bytes,
    )
    assert again == plan
    assert again.digest == plan.digest


@given(plans(), st.integers(1, 3))
def test_meshes_change_who_serves_and_nothing_else(case, num_slots: int) -> None:
    manifest, drawn, num_workers, plan = case
    whole_params = [
        replace(p, owners=tuple(sorted(p.owners)), mesh_shape=(), placements=())
        for p in manifest.params
    ]
    settings = {"num_workers": num_workers, "num_slots": num_slots, "max_chunk_bytes": 1 << 20}
    gathered = build_plan(Manifest.build(whole_params), drawn, plan.consumer, **settings)
    sharded = build_plan(manifest, drawn, plan.consumer, **settings)
    assert sharded.slice_bytes <= gathered.slice_bytes
    assert sharded.bytes_landed == gathered.bytes_landed
    assert sharded.fills == gathered.fills
    assert set(sharded.modules) == set(gathered.modules)
    for owner in sharded.owners:
        check_table(sharded.table(owner), manifest, owner)


def test_an_owner_of_no_rows_serves_and_gathers_nothing() -> None:
    params = [
        ParamMeta("l.0.w", "int8", (2, 3), (2, 0, 1), (3,), ("shard(0)",)),
        ParamMeta("l.1.w", "int8", (4, 3), (2, 0, 1), (3,), ("shard(0)",)),
        ParamMeta("l.2.w", "int8", (3, 3), (2, 0, 1), (3,), ("shard(0)",)),
    ]
    manifest = Manifest.build(params)
    assert [rank_schedule(manifest, rank) for rank in range(3)] == [(0, 1, 2), (2,), (0, 1, 2)]
    drawn = [copy(param, module=param.name) for param in params]
    plan = build_plan(manifest, drawn, ConsumerId(0, 0), num_workers=1)
    assert [(c.serve.group, c.owner, c.serve.num_bytes) for c in plan.chunks] == [
        *((0, 0, 3), (0, 2, 3)),
        *((1, 0, 6), (1, 2, 6)),
        *((2, 0, 3), (2, 1, 3), (2, 2, 3)),
    ]


def copy(meta: ParamMeta, module: str = "m", param: str = "weight") -> Placement:
    stride = contiguous_stride(meta.shape)
    return Placement(whole(meta), module, param, 0, meta.shape, stride, meta.dtype, stride)


EMBED = ParamMeta("embed", "int8", (4, 4), (0, 1))
EXPERTS = [ParamMeta(f"l.0.experts.{e}", "int8", (4, 4), (e,)) for e in (1, 0)]
NORM = ParamMeta("norm", "int8", (4,), (0, 1))
MANIFEST = Manifest.build([EMBED, *EXPERTS, NORM])


def plan_of(drawn, worker: int = 0, **settings) -> SyncPlan:
    return build_plan(MANIFEST, drawn, ConsumerId(0, worker), num_workers=2, **settings)


def test_experts_of_one_layer_on_two_ranks_are_two_chunks_by_owner() -> None:
    plan = plan_of([copy(EXPERTS[0]), copy(EXPERTS[1], param="other")])
    assert [(c.owner, c.serve.group, c.serve.seq) for c in plan.chunks] == [(0, 1, 0), (1, 1, 0)]
    assert plan.owners == (0, 1)
    assert [c.materialize for c in plan.chunks] == [("m",), ()]
    assert [c.complete for c in plan.chunks] == [(), ("m",)]


def test_a_module_fed_by_two_groups_stays_open_between_them() -> None:
    plan = plan_of([copy(EMBED, "tied"), copy(EXPERTS[0], "expert"), copy(NORM, "tied", "n")])
    assert [c.materialize for c in plan.chunks] == [("tied",), ("expert",), ()]
    assert [c.complete for c in plan.chunks] == [(), ("expert",), ("tied",)]


def test_chunks_of_two_pipeline_stages_alternate() -> None:
    params = [ParamMeta(f"l.{i}.w", "int8", (4,), (i // 2,)) for i in range(4)]
    drawn = [copy(param, module=param.name) for param in params]
    plan = build_plan(Manifest.build(params), drawn, ConsumerId(0, 0), num_workers=1)
    assert [(c.serve.group, c.owner, c.serve.seq) for c in plan.chunks] == [
        (0, 0, 0),
        (2, 1, 0),
        (1, 0, 1),
        (3, 1, 1),
    ]


def test_workers_of_two_replicas_have_one_digest_and_another_worker_has_not() -> None:
    drawn = [copy(EMBED), copy(NORM, param="n")]
    first, second = (
        build_plan(MANIFEST, drawn, ConsumerId(replica, 1), num_workers=2) for replica in (0, 1)
    )
    assert first != second
    assert first.digest == second.digest
    assert plan_of(drawn, worker=0).digest != first.digest  # served by other ranks


def test_modules_without_bytes_are_listed_and_empty_copies_dropped() -> None:
    empty = Slice("embed", "int8", 0, (0,), (1,))
    nothing = Placement(empty, "hollow", "weight", 0, (0, 4), (4, 1), "int8", (4, 1))
    fill = Fill("padded", "weight", 0, (2,), (1,), "int8", 0)
    nowhere = copy(EMBED, "hollow", "x")._replace(shape=(0, 4))
    plan = plan_of([nothing, fill, copy(NORM), nothing._replace(module="m", param="x"), nowhere])
    assert plan.modules_without_chunks == ("hollow", "padded")
    assert plan.modules == ("m", "hollow", "padded")
    assert [p.param for c in plan.chunks for p in c.placements] == ["weight"]
    assert plan.fills == (fill,)


def test_a_plan_of_fills_only_reads_nothing() -> None:
    plan = plan_of([Fill("m", "w", 0, (2,), (1,), "int8", 0)])
    assert (plan.chunks, plan.owners, plan.receive_slot_bytes, plan.bytes_pulled) == ((), (), 0, 0)
    with pytest.raises(PlanError, match=r"r0w0 reads nothing from rank 0"):
        plan.table(0)


@pytest.mark.parametrize(
    ("drawn", "settings", "error", "message"),
    [
        ([copy(replace(NORM, name="nrm"))], {}, PlanError, r"m\.weight: 'nrm' is not in the"),
        ([copy(replace(NORM, shape=(5,)))], {}, SliceError, "'norm'.*ends at byte 5"),
        ([copy(NORM)._replace(stride=(0,))], {}, PlanError, "written once"),
        ([copy(NORM)], {"worker": 2}, RoutingError, "found worker 2"),
        ([], {"worker": 2}, RoutingError, "found worker 2"),
        ([copy(NORM)], {"num_slots": 0}, PlanError, "num_slots=0"),
        ([copy(NORM)], {"max_chunk_bytes": 0}, PlanError, "max_chunk_bytes=0"),
        ([copy(NORM)], {"max_direct_bytes": 0}, PlanError, "max_direct_bytes=0"),
    ],
)
def test_bad_input_is_refused(drawn, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        plan_of(drawn, **settings)
