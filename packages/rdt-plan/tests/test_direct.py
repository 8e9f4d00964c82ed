"""Which pieces are direct: one run of bytes on both sides, in memory that both sides declared."""

from random import Random

import pytest
from hypothesis import Phase, find, settings

from rdt_plan import (
    ConsumerId,
    DirectRule,
    Fill,
    Manifest,
    ParamMeta,
    Placement,
    PlanError,
    ProducerRecord,
    Program,
    Slice,
    SourceRegion,
    SyncPlan,
    build_plan,
    canonical,
    contiguous_stride,
    whole,
)
from rdt_plan.direct import runs_within
from rdt_plan.program import Statement, Target
from rdt_plan.testing import plans

NORM = ParamMeta("l.0.norm", "bfloat16", (4,), (0,))
UP = ParamMeta("l.0.up", "bfloat16", (6, 4), (0,))
CUT = ParamMeta("l.0.cut", "bfloat16", (6, 4), (0, 1), (2,), ("shard(0)",))
SCALE = ParamMeta("l.0.scale", "float32", (), (0,))
MANIFEST = Manifest.build([NORM, UP, CUT, SCALE])
NAMES = frozenset(param.name for param in MANIFEST.params)
RULE = DirectRule({0: NAMES, 1: NAMES}, frozenset({("m", "w"), ("m", "v"), ("n", "w")}))


def copy(region: Slice, shape, stride=None, *, module="m", param="w", offset=0, **changes):
    strides = contiguous_stride(shape)
    write = Placement(
        region, module, param, offset, shape, stride or strides, region.dtype, strides
    )
    return write._replace(**changes)


def planned(*writes, rule: DirectRule = RULE, **settings) -> SyncPlan:
    return build_plan(MANIFEST, writes, ConsumerId(0, 0), num_workers=1, direct=rule, **settings)


def direct(plan: SyncPlan) -> list[tuple[int, str, int, int, int]]:
    """Of each direct piece its owner, name, offset, elements, and where it lands."""
    return [
        (chunk.owner, slice_.name, slice_.offset, slice_.numel, place.offset)
        for chunk in plan.chunks
        if chunk.is_direct
        for slice_, place in zip(chunk.serve.slices, chunk.placements, strict=True)
    ]


ROWS = canonical("l.0.up", "bfloat16", 8, (3, 4), (4, 1))
COLUMNS = canonical("l.0.up", "bfloat16", 0, (6, 2), (4, 1))


@pytest.mark.parametrize(
    "write",
    [
        copy(whole(UP), (6, 4)),
        copy(whole(UP), (24,)),
        copy(whole(UP), (1, 6, 1, 4), (99, 4, 77, 1)),  # the stride of one row means nothing
        copy(ROWS, (3, 4), offset=40),
        copy(whole(NORM), (4,)),
        copy(whole(SCALE), ()),
        copy(canonical("l.0.up", "uint8", 0, (48,), (1,)), (48,)),
    ],
)
def test_one_run_to_one_run_is_direct_and_spelled_as_one(write: Placement) -> None:
    (chunk,) = planned(write).chunks
    assert chunk.is_direct and chunk.serve.is_direct
    assert (chunk.serve.serve_slot, chunk.receive_slot, chunk.serve.offsets) == (None, None, ())
    assert chunk.serve.num_bytes == write.slice.num_bytes
    assert (chunk.materialize, chunk.complete) == (("m",), ("m",))
    (place,) = chunk.placements
    shape, stride = write.slice.shape, write.slice.stride
    assert place == write._replace(shape=shape, stride=stride, source_stride=stride)


@pytest.mark.parametrize(
    "writes",
    [
        [copy(whole(UP), (6, 4), (8, 1))],  # into columns
        [copy(whole(UP), (6, 4), (1, 6))],  # transposed where it lands
        [copy(whole(UP), (4, 6), source_stride=(1, 4))],  # and where it is read
        [copy(COLUMNS, (6, 2))],
        [copy(whole(UP), (6, 4), dtype="float16")],  # a cast
        [copy(whole(UP), (5, 4))],  # not all of it
        [copy(whole(NORM), (2, 4), source_stride=(0, 1))],  # a broadcast
        [copy(whole(UP), (6, 4)), copy(whole(UP), (6, 4), param="v")],  # two copies
        [copy(whole(UP), (6, 4), param="other")],  # no destination
        [copy(whole(UP), (6, 4)), Fill("m", "w", 30, (2,), (1,), "bfloat16", 0)],
    ],
)
def test_all_else_is_staged(writes) -> None:
    plan = planned(*writes)
    assert (plan.direct_bytes, plan.staged_bytes > 0) == (0, True)
    assert plan == planned(*writes, rule=DirectRule({}, frozenset()))


def test_a_module_with_a_program_is_staged_and_its_neighbour_is_not() -> None:
    program = Program("m", (Target("x"),), (Statement("aten.zero_.default", (), (), ()),))
    writes = [copy(whole(UP), (6, 4)), copy(whole(NORM), (4,), module="n")]
    assert direct(planned(*writes, programs=[program])) == [(0, "l.0.norm", 0, 4, 0)]


def test_a_sharded_name_is_decided_by_piece_and_owner() -> None:
    write = copy(whole(CUT), (6, 4))
    rule = DirectRule({0: frozenset(), 1: NAMES}, RULE.destinations)
    plan = planned(write, rule=rule)
    assert direct(plan) == [(1, "l.0.cut", 0, 12, 12)]
    assert [(c.owner, c.is_direct) for c in plan.chunks] == [(0, False), (1, True)]


def test_direct_chunks_come_first_in_their_group_and_take_no_numbers_of_slots() -> None:
    writes = [
        copy(COLUMNS, (6, 2), module="s", param="a"),
        copy(whole(NORM), (4,), module="n"),
        copy(whole(SCALE), (), module="s", param="b"),
        copy(whole(UP), (6, 4)),
        copy(canonical("l.0.norm", "bfloat16", 0, (2,), (2,)), (2,), module="s", param="c"),
    ]
    plan = planned(*writes, max_chunk_bytes=24, num_slots=2)
    assert [(c.serve.seq, c.serve.serve_slot, c.receive_slot) for c in plan.chunks] == [
        (0, None, None),
        (1, 0, 0),
        (2, 1, 1),
    ]
    assert direct(plan) == [(0, "l.0.norm", 0, 4, 0), (0, "l.0.up", 0, 24, 0)]
    assert (plan.direct_bytes, plan.staged_bytes) == (56, plan.bytes_pulled - 56)
    assert plan.receive_slot_bytes == 32
    assert "chunk 0: owner 0 seq 0, direct, 56 B, 2 slices" in plan.explain()
    assert "; 56 B direct, " in plan.explain()


def test_a_larger_run_is_cut_at_any_element() -> None:
    plan = planned(
        copy(whole(UP), (6, 4)), copy(whole(NORM), (4,), module="n"), max_direct_bytes=21
    )
    assert [c.serve.num_bytes for c in plan.chunks] == [20, 20, 16]
    assert direct(plan) == [
        (0, "l.0.up", 0, 10, 0),
        (0, "l.0.up", 10, 10, 10),
        (0, "l.0.up", 20, 4, 20),
        (0, "l.0.norm", 0, 4, 0),
    ]
    assert [c.materialize for c in plan.chunks] == [("m",), (), ("n",)]
    assert [c.complete for c in plan.chunks] == [(), (), ("m", "n")]


def test_an_element_larger_than_the_cap_is_a_chunk() -> None:
    runs = [copy(whole(SCALE), ())]
    assert [part for part, _ in runs_within(runs, 1)] == [runs]


def test_a_plan_that_is_all_direct_needs_no_slots() -> None:
    plan = planned(copy(whole(UP), (6, 4)))
    assert (plan.receive_slot_bytes, plan.table(0).slot_bytes, plan.staged_bytes) == (0, 0, 0)


def test_the_rule_of_a_job_is_what_its_producers_declare() -> None:
    def record(rank: int, *params: int) -> ProducerRecord:
        sources = tuple(SourceRegion(param, 4096, 0) for param in params)
        return ProducerRecord(rank, "0f" * 16, "wire", b"", "0f" * 32, sources)

    rule = DirectRule.of(MANIFEST, [record(0, 0, 2), record(1, 2)], [("m", "w")])
    held = [{"l.0.norm", "l.0.cut", "l.0.up", "l.0.scale"}, {"l.0.cut"}]
    assert [rule.sources[rank] & held[rank] for rank in (0, 1)] == [
        {"l.0.norm", "l.0.cut"},
        {"l.0.cut"},
    ]
    assert rule.destinations == {("m", "w")}
    for wrong in (0, 4):  # held by another rank; none at all
        message = f"producer 1: .* found parameter {wrong} of 4"
        with pytest.raises(PlanError, match=message):
            DirectRule.of(MANIFEST, [record(1, wrong)], [])


def test_drawn_plans_are_direct_and_staged_at_once() -> None:
    find(
        plans(direct=True),
        lambda case: {chunk.is_direct for chunk in case[-1].chunks} == {True, False},
        settings=settings(phases=[Phase.generate]),
        random=Random(0),
    )
