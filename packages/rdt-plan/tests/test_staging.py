from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import (
    ConsumerId,
    Fill,
    Manifest,
    ParamMeta,
    Placement,
    PlanError,
    Slice,
    SyncPlan,
    build_plan,
    check_table,
    decode_plan,
    encode_plan,
    is_staging,
    staging_name,
)
from rdt_plan.program import Input, Operand, Program, Statement, Target
from rdt_plan.testing import (
    manifests,
    pack_slice,
    piece_bytes,
    place,
    programs,
    serve_chunk,
    writes,
)

META = ParamMeta("w", "float32", (4, 6))
WHOLE = Slice("w", "float32", 0, (24,), (1,))
PROGRAM = Program(
    "norm",
    (Target("weight"), Input(WHOLE)),
    (Statement("aten.copy_.default", (Operand(0, "float32", 0, (24,), (1,)),), (), ()),),
)
PLACEMENT = Placement(WHOLE, "norm", "bias", 0, (24,), (1,), "float32", (1,))


def plan_of(*found: Program, writes=(), **settings: int) -> SyncPlan:
    manifest = Manifest.build([META])
    return build_plan(manifest, writes, ConsumerId(0, 0), num_workers=1, programs=found, **settings)


def test_an_input_is_fetched_once_whoever_else_wants_it() -> None:
    plan = plan_of(PROGRAM, replace(PROGRAM, module="other"), writes=[PLACEMENT])
    (chunk,) = plan.chunks
    assert chunk.serve.slices == (WHOLE,)
    assert [(p.module, p.param) for p in chunk.placements] == [
        ("norm", "bias"),
        ("norm", "%1"),
        ("other", "%1"),
    ]
    assert chunk.materialize == chunk.complete == ("norm", "other")
    assert plan.bytes_landed == plan.bytes_pulled == 96  # staging is not counted
    assert plan.staging_bytes == {"norm": 96, "other": 96}


def test_a_program_without_inputs_has_no_chunk() -> None:
    empty = Slice("w", "float32", 0, (0,), (1,))
    statement = replace(PROGRAM.statements[0], args=())
    for registers in ((Target("weight"),), (Target("weight"), Input(empty))):
        plan = plan_of(Program("norm", registers, (statement,)))
        assert plan.chunks == ()
        assert plan.modules == plan.modules_without_chunks == ("norm",)
        assert plan.staging_bytes == {"norm": 0}


@pytest.mark.parametrize(
    ("found", "others", "message"),
    [
        ([PROGRAM, PROGRAM], [], "expected one a module, found two"),
        ([replace(PROGRAM, statements=())], [], "at least one statement"),
        ([PROGRAM], [PLACEMENT._replace(param="weight")], "among its statements"),
        ([PROGRAM], [Fill("norm", "weight", 0, (), (), "int8", 0)], "among its statements"),
        ([], [PLACEMENT._replace(param="%1")], "none into its inputs"),
        (
            [replace(PROGRAM, registers=(Target("weight"), Input(WHOLE._replace(name="x"))))],
            [],
            r"norm\.%1: .*'x'",
        ),
    ],
)
def test_programs_that_contradict_are_refused(found, others, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(*found, writes=others)


def test_a_program_is_explained() -> None:
    lines = plan_of(PROGRAM).explain().splitlines()
    assert "program of norm: weight from w (96 B) by aten.copy_.default" in lines


@st.composite
def programmed(draw: st.DrawFn):
    """A manifest, and a plan of two programs over it beside other writes."""
    manifest = draw(manifests())
    found = [draw(programs(manifest, module)) for module in ("computed", "a")]
    num_workers = draw(st.integers(1, 3))
    plan = build_plan(
        manifest,
        draw(writes(manifest, max_writes=4)),
        ConsumerId(0, draw(st.integers(0, num_workers - 1))),
        num_workers=num_workers,
        num_slots=draw(st.integers(1, 3)),
        max_chunk_bytes=draw(st.sampled_from((1, 16, 64, 200, 1 << 20))),
        programs=found,
    )
    return manifest, plan


@settings(max_examples=60)
@given(programmed(), st.randoms(use_true_random=False))
def test_every_input_arrives_whole_whatever_the_cap_and_the_mesh(case, random) -> None:
    manifest, plan = case
    sources = {p.name: random.randbytes(p.num_bytes) for p in manifest.params}
    staged: dict[tuple[str, str], bytearray] = {
        (program.module, staging_name(register)): bytearray(slice_.num_bytes)
        for program in plan.programs
        for register, slice_ in program.inputs
    }
    for owner in plan.owners:
        check_table(plan.table(owner), manifest, owner)
    for chunk in plan.chunks:
        held = {
            name: piece_bytes(manifest.param(name), chunk.owner, sources[name])
            for name in {slice_.name for slice_ in chunk.serve.slices}
        }
        packed = serve_chunk(chunk.serve, held)
        offsets = dict(zip(chunk.serve.slices, chunk.serve.offsets, strict=True))
        for placement in filter(lambda each: is_staging(each.param), chunk.placements):
            slice_ = placement.slice
            data = packed[offsets[slice_] : offsets[slice_] + slice_.num_bytes]
            place(placement, data, staged[placement.module, placement.param])
    for program in plan.programs:
        for register, slice_ in program.inputs:
            found = staged[program.module, staging_name(register)]
            assert bytes(found) == pack_slice(slice_, sources[slice_.name])
        begun = [chunk.index for chunk in plan.chunks if program.module in chunk.materialize]
        ended = [chunk.index for chunk in plan.chunks if program.module in chunk.complete]
        assert len(begun) == len(ended) == (program.module not in plan.modules_without_chunks)


@settings(max_examples=30)
@given(programmed())
def test_a_plan_with_programs_comes_back_and_they_are_in_its_digest(case) -> None:
    _, plan = case
    again = decode_plan(encode_plan(plan))
    assert again == plan
    assert again.digest == plan.digest
    assert (
        len({plan.digest, *(replace(plan, programs=p).digest for p in ((), plan.programs[:1]))})
        == 3
    )
