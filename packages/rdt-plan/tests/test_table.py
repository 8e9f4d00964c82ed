from dataclasses import replace

import pytest

from rdt_plan import (
    ChunkTable,
    ConsumerId,
    Manifest,
    ParamMeta,
    Placement,
    PlanError,
    Slice,
    SliceError,
    build_plan,
    check_table,
    contiguous_stride,
    whole,
)

PARAMS = [
    ParamMeta("embed", "bfloat16", (4, 4), (0,)),
    ParamMeta("l.0.w", "bfloat16", (8, 4), (0, 1)),
    ParamMeta("l.0.expert", "bfloat16", (4,), (1,)),
    ParamMeta("l.1.w", "bfloat16", (3,), (0,)),
]
MANIFEST = Manifest.build(PARAMS)


def table() -> ChunkTable:
    drawn = []
    for param in (PARAMS[0], PARAMS[1], PARAMS[3]):
        stride = contiguous_stride(param.shape)
        copy = Placement(whole(param), "m", param.name, 0, param.shape, stride, "bfloat16", stride)
        drawn.append(copy)
    plan = build_plan(MANIFEST, drawn, ConsumerId(0, 0), num_workers=2, max_chunk_bytes=32)
    return plan.table(0)


def with_chunk(at: int, **changes) -> ChunkTable:
    rows = list(table().chunks)
    rows[at] = replace(rows[at], **changes)
    return replace(table(), chunks=tuple(rows))


def with_slice(slice_: Slice) -> ChunkTable:
    return with_chunk(1, slices=(slice_,), offsets=(0,), num_bytes=slice_.num_bytes)


def test_accepts_what_the_plan_says() -> None:
    assert [(c.group, c.num_bytes) for c in table().chunks] == [(0, 32), (1, 32), (1, 32), (2, 6)]
    check_table(table(), MANIFEST, 0)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (replace(table(), owner=1), PlanError, "for rank 1: expected a table for rank 0"),
        (replace(table(), num_slots=0), PlanError, "at least 1 slot"),
        (replace(table(), slot_bytes=40), PlanError, "slot_bytes=32, .* found slot_bytes=40"),
        (replace(table(), slot_bytes=16), PlanError, "slot_bytes=32, .* found slot_bytes=16"),
        (replace(table(), slot_bytes=48), PlanError, "slot_bytes=32, .* found slot_bytes=48"),
        (replace(table(), slot_bytes=1 << 62), PlanError, "slot_bytes=32, what its largest"),
        (replace(table(), chunks=table().chunks[1:]), PlanError, "chunk 1: expected seq 0"),
        (with_chunk(2, seq=1), PlanError, "chunk 1: expected seq 2.*without repeats"),
        (with_chunk(1, serve_slot=0), PlanError, "expected serve slot 1, found 0"),
        (with_chunk(1, serve_slot=3), PlanError, "expected serve slot 1, found 3"),
        (with_chunk(1, group=9), PlanError, "holds nothing of gather group 9"),
        (with_chunk(0, group=1), PlanError, "names of gather group 1, found 'embed' of group 0"),
        (with_chunk(1, offsets=(16,)), PlanError, r"pack layout offsets=\(0,\)"),
        (with_chunk(1, offsets=()), PlanError, "pack layout"),
        (with_chunk(1, num_bytes=31), PlanError, "found offsets.*num_bytes=31"),
        (with_chunk(1, slices=(), offsets=(), num_bytes=0), PlanError, "empty one"),
        (with_slice(Slice("l.0.w", "bfloat16", 0, (0,), (1,))), PlanError, "empty one"),
        (with_slice(Slice("l.0.expert", "bfloat16", 0, (4,), (1,))), PlanError, "not by rank 0"),
        (with_slice(Slice("l.0.v", "bfloat16", 0, (4,), (1,))), PlanError, "'l.0.v' is not in"),
        (with_slice(Slice("l.0.w", "bfloat16", 17, (16,), (1,))), SliceError, "ends at byte 66"),
        (with_slice(Slice("l.0.w", "bfloat16", 0, (4, 4), (4, 1))), SliceError, "canonical"),
        (with_slice(Slice("l.0.w", "bfloat16", -1, (4,), (1,))), SliceError, "negative"),
    ],
)
def test_refuses(bad: ChunkTable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_table(bad, MANIFEST, 0)


def test_refuses_groups_out_of_schedule_order() -> None:
    rows = [table().chunks[i] for i in (1, 0, 2, 3)]
    rows = [replace(row, seq=seq, serve_slot=seq % 2) for seq, row in enumerate(rows)]
    with pytest.raises(PlanError, match="chunk 1: expected gather groups in schedule order"):
        check_table(replace(table(), chunks=tuple(rows)), MANIFEST, 0)
