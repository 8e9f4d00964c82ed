from dataclasses import replace

import pytest

from rdt_plan import (
    ChunkTable,
    ConsumerId,
    Manifest,
    ParamMeta,
    Placement,
    PlanError,
    ServeChunk,
    Slice,
    SliceError,
    align,
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
TWICE = Slice("l.0.w", "bfloat16", 0, (8,), (1,))
WHOLE = ParamMeta("w", "int8", (5, 4), (1,))


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


def direct_table() -> ChunkTable:
    """What `table` reads but for ``l.0.w``, which is packed, directly."""
    chunks = list(table().chunks)
    for at in (0, 3):
        row = chunks[at]
        chunks[at] = replace(row, serve_slot=None, offsets=())
    for slot, at in enumerate((1, 2)):
        chunks[at] = replace(chunks[at], serve_slot=slot)
    return replace(table(), chunks=tuple(chunks))


def with_direct(**changes) -> ChunkTable:
    rows = list(direct_table().chunks)
    rows[3] = replace(rows[3], **changes)
    return replace(direct_table(), chunks=tuple(rows))


def with_slice(slice_: Slice) -> ChunkTable:
    return with_chunk(1, slices=(slice_,), offsets=(0,), num_bytes=slice_.num_bytes)


def test_accepts_what_the_plan_says() -> None:
    assert [(c.group, c.num_bytes) for c in table().chunks] == [(0, 32), (1, 32), (1, 32), (2, 6)]
    check_table(table(), MANIFEST, 0)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (replace(table(), owner=1), PlanError, "for rank 1: expected a table for rank 0"),
        (replace(table(), plan_digest=""), PlanError, "64 lower-case hexadecimal digits, found ''"),
        (replace(table(), plan_digest="G" * 64), PlanError, "expected the plan's digest"),
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
        (
            with_chunk(1, slices=(TWICE, TWICE), offsets=(0, 16)),
            PlanError,
            "each slice once.* l.0.w",
        ),
        (with_slice(Slice("l.0.w", "bfloat16", 0, (0,), (1,))), PlanError, "empty one"),
        (with_slice(Slice("l.0.expert", "bfloat16", 0, (4,), (1,))), PlanError, "not by rank 0"),
        (with_slice(Slice("l.0.v", "bfloat16", 0, (4,), (1,))), PlanError, "'l.0.v' is not in"),
        (with_slice(Slice("l.0.w", "bfloat16", 17, (16,), (1,))), SliceError, "ends at byte 66"),
        (with_slice(Slice("l.0.w", "bfloat16", 0, (4, 4), (4, 1))), SliceError, "canonical"),
        (with_slice(Slice("l.0.w", "bfloat16", -1, (4,), (1,))), SliceError, "negative"),
    ],
)
def test_refuses(bad: ChunkTable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        check_table(bad, MANIFEST, 0)
    assert str(caught.value).startswith(f"chunk table of r0w0 for rank {bad.owner}")
    assert "build the plan from the manifest" in str(caught.value)


def test_refuses_groups_out_of_schedule_order() -> None:
    rows = [table().chunks[i] for i in (1, 0, 2, 3)]
    rows = [replace(row, seq=seq, serve_slot=seq % 2) for seq, row in enumerate(rows)]
    with pytest.raises(PlanError, match="chunk 1: expected gather groups in schedule order"):
        check_table(replace(table(), chunks=tuple(rows)), MANIFEST, 0)


SHARDED = Manifest.build([ParamMeta("w", "int8", (5, 4), (2, 0, 1), (3,), ("shard(0)",))])


def piece_table(rank: int, numel: int) -> ChunkTable:
    row = ServeChunk(0, 0, 0, numel, (Slice("w", "int8", 0, (numel,), (1,)),), (0,))
    return ChunkTable(ConsumerId(0, 0), rank, "0" * 64, 2, align(numel), (row,))


def test_slices_of_a_sharded_name_are_checked_against_what_the_rank_holds() -> None:
    for rank, numel in ((2, 8), (0, 8), (1, 4)):
        check_table(piece_table(rank, numel), SHARDED, rank)
        with pytest.raises(SliceError, match=f"within its {numel} bytes"):
            check_table(piece_table(rank, numel + 1), SHARDED, rank)
    short = Manifest.build([replace(SHARDED.param("w"), shape=(2, 4)), replace(WHOLE, name="x")])
    with pytest.raises(PlanError, match=r"'w' is held by ranks \(2, 0\), not by rank 1"):
        check_table(piece_table(1, 4), short, 1)


def test_direct_chunks_take_no_slot_and_read_declared_sources_only() -> None:
    sources = {"embed", "l.1.w"}
    check_table(direct_table(), MANIFEST, 0, sources)
    alone = replace(direct_table(), chunks=direct_table().chunks[:1], slot_bytes=0)
    check_table(alone, MANIFEST, 0, sources)
    for name in sources:
        with pytest.raises(PlanError, match=f"declared sources only, found '{name}'"):
            check_table(direct_table(), MANIFEST, 0, sources - {name})


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (with_direct(serve_slot=0), PlanError, r"expected the pack layout offsets=\(0,\)"),
        (with_direct(offsets=(0,)), PlanError, r"offsets=\(\) and num_bytes=6, found offsets=\(0,"),
        (with_direct(num_bytes=8), PlanError, "num_bytes=6, found .* num_bytes=8"),
        (with_direct(slices=(), num_bytes=0), PlanError, "a direct chunk of at least 1 byte"),
        (
            with_direct(slices=(Slice("l.1.w", "bfloat16", 0, (2,), (2,)),), num_bytes=4),
            PlanError,
            "direct slices of one run of bytes",
        ),
        (
            with_direct(slices=(Slice("l.1.w", "bfloat16", 1, (3,), (1,)),)),
            SliceError,
            "within its 6 bytes",
        ),
        (
            replace(direct_table(), slot_bytes=48),
            PlanError,
            "slot_bytes=32, .* found slot_bytes=48",
        ),
    ],
)
def test_refuses_a_direct_chunk_that_it_cannot_serve(bad, error, message) -> None:
    with pytest.raises(error, match=message):
        check_table(bad, MANIFEST, 0, {"embed", "l.1.w"})
