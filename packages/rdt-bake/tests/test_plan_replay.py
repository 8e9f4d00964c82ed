"""Plans followed chunk by chunk: what comes out is what the loaders make, whatever the chunks."""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake import PlanReplay, ReplayError, find_tensor, read_slice, record, written_targets
from rdt_plan import Chunk, ConsumerId, Manifest, ParamMeta, SyncPlan, build_plan
from rdt_plan.program import Constant, Operand, Program, Statement, Target

SHAPES = {
    "0.a": (6, 4),
    "0.b": (6, 4),
    "0.plain": (5,),
    "1.a": (6, 4),
    "1.b": (6, 4),
    "2.a": (6, 4),
}


class Part(nn.Module):
    """Computes ``mixed`` and ``sums``, copies ``plain``, and fills ``scale`` from no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.full((4, 12), 7.0, dtype=torch.bfloat16))
        self.register_buffer("sums", torch.full((6,), 7.0))
        self.plain = nn.Parameter(torch.full((5,), 7.0))
        self.scale = nn.Parameter(torch.full((3,), 7.0))
        self.made = nn.Parameter(torch.full((3,), 7.0))


class Model(nn.Module):
    """Its last part is written by a program that reads no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part(), Part()])

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            number, kind = name.split(".")
            part: Any = self.parts[int(number)]
            if kind == "plain":
                part.plain.data.copy_(weight)
            elif number == "2":
                part.made.data.copy_(torch.tensor([1.0, 2.0, 3.0]) * 2)
            else:
                half = slice(0, 6) if kind == "a" else slice(6, 12)
                part.mixed.data[:, half].copy_((weight * 0.5).t())
                part.sums.copy_(weight.sum(1)) if kind == "a" else part.sums.add_(weight[:, 0])
            part.scale.data.fill_(3.0)


MANIFEST = Manifest.build([ParamMeta(name, "float32", shape) for name, shape in SHAPES.items()])


def plan_of(max_chunk_bytes: int = 64) -> SyncPlan:
    model = Model()
    recording = record(model, model.load, MANIFEST.params)
    return build_plan(
        MANIFEST,
        recording.writes,
        ConsumerId(0, 0),
        num_workers=1,
        max_chunk_bytes=max_chunk_bytes,
        programs=recording.programs,
    )


def weights_of(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def packed(chunk: Chunk, weights: Mapping[str, Tensor]) -> Tensor:
    slot = torch.full((chunk.serve.num_bytes,), 0xA5, dtype=torch.uint8)
    for region, offset in zip(chunk.serve.slices, chunk.serve.offsets, strict=True):
        values = read_slice(weights[region.name], region).contiguous().flatten()
        slot[offset : offset + region.num_bytes] = values.view(torch.uint8)
    return slot


def finder(model: nn.Module) -> Any:
    return lambda module, name: find_tensor(model, module, name)


def differences(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    fresh = Model()
    fresh.load(weights.items())
    found = model.state_dict()
    return [n for n, t in fresh.state_dict().items() if not torch.equal(found[n], t)]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from((1, 16, 48, 64, 100, 1 << 20)), st.integers(0, 99))
def test_every_sync_makes_what_the_loaders_make(cap: int, seed: int) -> None:
    plan, model = plan_of(cap), Model()
    assert {program.module for program in plan.programs} >= {"parts.0", "parts.1"}
    replay = PlanReplay(plan, finder(model))
    for each in (seed, seed + 1):
        weights = weights_of(each)
        assert differences(model, weights)
        for chunk in plan.chunks:
            replay.install(chunk, packed(chunk, weights))
        replay.finish()
        assert differences(model, weights) == []


def test_a_program_that_reads_no_weight_runs_at_the_end() -> None:
    values = Constant("float32", (3,), torch.tensor([2.0, 4.0, 6.0]).numpy().tobytes())
    operands = [Operand(index, "float32", 0, (3,), (1,)) for index in (0, 1)]
    program = Program(
        "", (Target("w"), values), (Statement("aten.copy_.default", tuple(operands), (), ()),)
    )
    plan = build_plan(MANIFEST, (), ConsumerId(0, 0), num_workers=1, programs=[program])
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    PlanReplay(plan, finder(model)).finish()
    assert model["w"].tolist() == [2.0, 4.0, 6.0]


def test_a_program_that_fails_is_named_and_the_next_sync_is_whole() -> None:
    plan, model = plan_of(), Model()
    broken = tuple(
        replace(p, statements=(*p.statements, Statement("aten.none_such.default", (), (), ())))
        if p.module == "parts.1"
        else p
        for p in plan.programs
    )
    replay = PlanReplay(replace(plan, programs=broken), finder(model))
    weights = weights_of(3)
    with pytest.raises(ReplayError, match=r"parts\.1: statement \d+ \(aten\.none_such\.default\)"):
        for chunk in plan.chunks:
            replay.install(chunk, packed(chunk, weights))
    replay.abandon()
    healed = PlanReplay(plan, finder(model))
    for chunk in plan.chunks:
        healed.install(chunk, packed(chunk, weights))
    healed.finish()
    assert differences(model, weights) == []


def held_bytes(shapes: set[int]) -> int:
    """Bytes of the live 1-D byte tensors of these lengths."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is Tensor and o.dtype == torch.uint8]
    return sum(t.numel() for t in found if t.ndim == 1 and t.numel() in shapes)


def test_staging_lives_from_open_to_compute_or_abandon() -> None:
    plan, model = plan_of(), Model()
    sizes = {s.num_bytes for p in plan.programs for _, s in p.inputs}
    replay = PlanReplay(plan, finder(model))
    before = held_bytes(sizes)
    for program in plan.programs:
        replay.open(program.module)
    assert held_bytes(sizes) - before == sum(plan.staging_bytes.values())
    replay.abandon()
    replay.abandon()
    assert held_bytes(sizes) == before
    weights = weights_of(1)
    for chunk in plan.chunks:
        replay.install(chunk, packed(chunk, weights))
    assert held_bytes(sizes) == before


def test_what_is_out_of_order_is_refused() -> None:
    plan, model = plan_of(), Model()
    replay = PlanReplay(plan, finder(model))
    staged = next(c for c in plan.chunks if any(p.param[0] == "%" for p in c.placements))
    with pytest.raises(ReplayError, match="is not open"):
        replay.place(staged, packed(staged, weights_of(1)))
    with pytest.raises(ReplayError, match=r"'parts\.0' is not open"):
        replay.compute("parts.0")


def test_written_targets_leave_out_what_is_only_read() -> None:
    (found,) = [p for p in plan_of().programs if p.module == "parts.0"]
    assert written_targets(found) == {"mixed", "sums"}
    view = Operand(0, "float32", 0, (3,), (1,))
    other = replace(view, register=1)
    registers = (Target("a"), Target("b"))
    for op, args, kwargs, expected in (
        ("aten.copy_.default", (view, other), (), {"a"}),
        ("aten.add.out", (view, view), (("out", other),), {"b"}),
        ("aten._foreach_copy_.default", ((view,), (other,)), (), {"a"}),
        ("aten.add.Tensor", (view, other), (), set()),
    ):
        program = Program("", registers, (Statement(op, args, kwargs, ()),))
        assert written_targets(program) == expected
    lost = Program("m", registers, (Statement("aten.none_such.default", (), (), ()),))
    with pytest.raises(ReplayError, match=r"m: torch has no aten\.none_such\.default"):
        written_targets(lost)


def test_a_program_that_leaves_its_target_is_refused_and_no_memory_grows() -> None:
    target = torch.zeros(3)
    beyond = Operand(0, "float32", 1, (3,), (1,))
    program = Program("m", (Target("w"),), (Statement("aten.fill_.Scalar", (beyond, 1.0), (), ()),))
    plan = build_plan(MANIFEST, (), ConsumerId(0, 0), num_workers=1, programs=[program])
    with pytest.raises(ReplayError, match=r"ends at byte 16, found 12 bytes"):
        PlanReplay(plan, lambda module, name: target).finish()
    assert target.untyped_storage().nbytes() == 12
    assert target.tolist() == [0.0, 0.0, 0.0]
