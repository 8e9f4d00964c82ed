"""A recording is right when its replay equals the model's own load, bit for bit."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rdt_bake.places import places
from rdt_bake.plan_replay import PlanReplay
from rdt_bake.record import no_exemption, record
from rdt_bake.recording import Recording
from rdt_bake.replay import (
    apply_fill,
    apply_placement,
    fetch_from,
    read_slice,
    replay,
    replay_program,
)
from rdt_plan import (
    ConsumerId,
    Fill,
    Manifest,
    ParamMeta,
    build_plan,
    check_bounds,
    check_write,
    group_ordered,
)
from rdt_plan.program_rules import check_program

__all__ = ["check_recording", "differing_places", "random_weights"]

Load = Callable[[nn.Module, Iterable[tuple[str, Tensor]]], Any]


def random_weights(params: Sequence[ParamMeta], seed: int = 0) -> dict[str, Tensor]:
    """CPU tensors as ``params`` says, of finite values drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for meta in params:
        dtype = getattr(torch, meta.dtype)
        values = torch.randn(meta.shape, generator=generator) * 8
        if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
            values = values.abs()
        weights[meta.name] = values > 0 if dtype == torch.bool else values.to(dtype)
    return weights


def check_recording(
    make_model: Callable[[], nn.Module],
    load: Load,
    params: Sequence[ParamMeta],
    *,
    exempt: Callable[[str, str], bool] = no_exemption,
    seed: int = 0,
) -> Recording:
    """Records ``load`` and checks its replay against a load of random weights.

    Copies are replayed three times: in the recording's order, shuffled after the fills, and cut
    into the small chunks of a plan; programs run last each time.

    Args:
        make_model: builds a model of CPU tensors; called several times, it must build the same.
        load: loads (name, tensor) pairs into a model.
        params: the weights.
        exempt: as for `record`.
        seed: of the weights and the shuffle.

    Raises:
        AssertionError: names the places that differ.
    """
    recorded = make_model()
    recording = record(recorded, lambda pairs: load(recorded, pairs), params, exempt=exempt)
    weights = random_weights(params, seed)
    for write in recording.writes:
        check_write(write)
    metas = {meta.name: meta for meta in params}
    slices = [placement.slice for placement in recording.placements]
    for program in recording.programs:
        check_program(program)
        slices += [region for _, region in program.inputs]
    for region in slices:
        check_bounds(region, metas[region.name])
    loaded, replayed, shuffled, planned = (_poisoned(make_model()) for _ in range(4))
    load(loaded, [(name, weight.clone()) for name, weight in weights.items()])
    replay(recording, replayed, fetch_from(weights))
    _replay_shuffled(recording, shuffled, weights, seed)
    _replay_planned(recording, planned, params, weights)
    for program in recording.programs:
        replay_program(program, shuffled, fetch_from(weights))
    replays = {"replayed": replayed, "in another order": shuffled, "by a plan": planned}
    for how, model in replays.items():
        found = differing_places(loaded, model)
        if found:
            raise AssertionError(f"{how}, these differ from the model's own load: {found}")
    return recording


def differing_places(left: nn.Module, right: nn.Module) -> list[str]:
    """Places of two models built alike whose tensors are not equal bit for bit."""
    pairs = zip(places(left), places(right), strict=True)
    return [
        f"{a.module}.{a.param}" if a.module else a.param
        for a, b in pairs
        if a.tensor.shape != b.tensor.shape or _bytes(a.tensor) != _bytes(b.tensor)
    ]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _poisoned(model: nn.Module) -> nn.Module:
    """The model with every parameter's bytes set, so that what a load leaves alone shows."""
    with torch.no_grad():
        for place in places(model):
            if place.kind == "parameter" and place.tensor.numel():
                flat = torch.empty(0, dtype=torch.uint8).set_(place.tensor.untyped_storage())
                flat.fill_(1)  # a legal bool, too
    return model


def _replay_shuffled(
    recording: Recording, model: nn.Module, weights: dict[str, Tensor], seed: int
) -> None:
    fetch = fetch_from(weights)
    spots = _filled(recording.fills, model)
    shuffled = list(recording.placements)
    random.Random(seed).shuffle(shuffled)
    for placement in shuffled:
        packed = fetch(placement.slice).contiguous().reshape(-1).view(torch.uint8)
        apply_placement(placement, packed, spots[placement.module, placement.param])


def _replay_planned(
    recording: Recording,
    model: nn.Module,
    params: Sequence[ParamMeta],
    weights: dict[str, Tensor],
) -> None:
    """As a worker gets it: packed chunks of at most 64 bytes where slices can be cut."""
    metas = {meta.name: meta for meta in params}
    manifest = Manifest.build([metas[name] for name in group_ordered(list(metas))])
    plan = build_plan(
        manifest,
        recording.writes,
        ConsumerId(0, 0),
        num_workers=1,
        max_chunk_bytes=64,
        programs=recording.programs,
    )
    spots = {(place.module, place.param): place.tensor for place in places(model)}
    plan_replay = PlanReplay(plan, lambda module, param: spots[module, param])
    for chunk in plan.chunks:
        slot = torch.zeros(chunk.serve.num_bytes, dtype=torch.uint8)
        for region, offset in zip(chunk.serve.slices, chunk.serve.offsets, strict=True):
            values = read_slice(weights[region.name], region).contiguous().reshape(-1)
            slot[offset : offset + region.num_bytes] = values.view(torch.uint8)
        plan_replay.install(chunk, slot)
    plan_replay.finish()


def _filled(fills: Sequence[Fill], model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Runs the fills; returns the model's tensors by place."""
    spots = {(place.module, place.param): place.tensor for place in places(model)}
    for fill in fills:
        apply_fill(fill, spots[fill.module, fill.param])
    return spots
