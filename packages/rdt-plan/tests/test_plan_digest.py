from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import Fill, Program
from rdt_plan.program import Statement, Target
from rdt_plan.testing import plans

PROGRAM = Program("m", (Target("w"),), (Statement("aten.zero_.default", (), (), ()),))


@settings(max_examples=50)
@given(plans(direct=True), st.data())
def test_the_digest_changes_with_every_field(case, data: st.DataObject) -> None:
    plan = case[-1]
    changes = [
        {"manifest_digest": "0" * 64},
        {"schedule": (*plan.schedule, len(plan.schedule))},
        {"num_slots": plan.num_slots + 1},
        {"max_chunk_bytes": plan.max_chunk_bytes + 1},
        {"fills": (*plan.fills, Fill("m", "w", 0, (), (), "int8", 1))},
        {"modules_without_chunks": (*plan.modules_without_chunks, "x")},
        {"programs": (PROGRAM,)},
        {"programs": (PROGRAM, PROGRAM)},
    ]
    if plan.chunks:
        at = data.draw(st.integers(0, len(plan.chunks) - 1))
        changes += [{"chunks": plan.chunks[:at] + plan.chunks[at + 1 :]}]
        for changed in changed_chunks(plan.chunks[at]):
            changes.append({"chunks": (*plan.chunks[:at], changed, *plan.chunks[at + 1 :])})
    digests = [replace(plan, **change).digest for change in changes]
    assert len({plan.digest, *digests}) == 1 + len(changes)


def changed_chunks(chunk):
    serve, placement = chunk.serve, chunk.placements[0]
    yield replace(chunk, index=chunk.index + 1)
    yield replace(chunk, owner=chunk.owner + 1)
    yield replace(chunk, receive_slot=9 if chunk.is_direct else None)
    yield replace(chunk, receive_slot=10 if chunk.is_direct else chunk.receive_slot + 1)
    yield replace(chunk, materialize=(*chunk.materialize, "x"))
    yield replace(chunk, complete=(*chunk.complete, "x"))
    yield replace(chunk, serve=replace(serve, seq=serve.seq + 1))
    yield replace(chunk, serve=replace(serve, group=serve.group + 1))
    yield replace(chunk, serve=replace(serve, serve_slot=9 if serve.is_direct else None))
    slot = 10 if serve.is_direct else serve.serve_slot + 1
    yield replace(chunk, serve=replace(serve, serve_slot=slot))
    yield replace(chunk, serve=replace(serve, num_bytes=serve.num_bytes + 1))
    yield replace(chunk, serve=replace(serve, offsets=(*serve.offsets, 0)))
    yield replace(chunk, serve=replace(serve, slices=(*serve.slices, serve.slices[0])))
    for change in (
        {"module": placement.module + "x"},
        {"param": placement.param + "x"},
        {"offset": placement.offset + 1},
        {"shape": (*placement.shape, 1)},
        {"stride": (*placement.stride, 1)},
        {"dtype": "complex128"},
        {"source_stride": (*placement.source_stride, 1)},
    ):
        changed = placement._replace(**change)
        yield replace(chunk, placements=(changed, *chunk.placements[1:]))
