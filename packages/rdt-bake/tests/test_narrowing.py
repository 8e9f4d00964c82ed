"""A worker pulls what lands, however late the loader takes its part."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
W = [ParamMeta("w", "float32", (8, 12))]
QKV = [ParamMeta(name, "float32", (8, 12)) for name in ("q", "k", "v")]


def pulled(
    shape: tuple[int, ...],
    load: Callable[[Tensor, dict[str, Tensor]], Any],
    params: list[ParamMeta] = W,
) -> int:
    """Bytes of the checked recording of a load into one parameter of float32."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(shape), requires_grad=False)

    recording = check_recording(One, lambda m, pairs: load(m.w.data, dict(pairs)), params)
    recording.require_coverage()
    return recording.bytes_pulled


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: -w,
        lambda w: w.half().float(),
        lambda w: w.bfloat16().neg().double().exp(),
        lambda w: (w + 1) * 2,
        lambda w: w.t().contiguous().neg().t(),
        lambda w: w.unflatten(1, (3, 4)).exp().flatten(1),
        lambda w: w.flip(0),
        lambda w: w.flip(1).flip(1).neg(),
        lambda w: w.clamp(min=0).clone().mul_(3).add_(1),
        lambda w: torch.where(w > 0, w, w * 2),
        lambda w: torch.arange(12.0) * w,
        lambda w: w * w.new_ones(8, 1) * 2,
        lambda w: torch.arange(14.0)[w.abs().long() % 14],
        lambda w: w.mul_(2),
        lambda w: w.masked_fill_(torch.eye(8, 12).bool(), 1).neg(),
    ],
)
@pytest.mark.parametrize(
    "take", [lambda w: w[2:4], lambda w: w[:, 3:9], lambda w: w.chunk(4, 1)[2][4:], lambda w: w[3]]
)
def test_only_the_region_is_pulled(
    compute: Callable[[Tensor], Tensor], take: Callable[[Tensor], Tensor]
) -> None:
    region = take(torch.zeros(8, 12))
    assert (
        pulled(tuple(region.shape), lambda p, w: p.copy_(take(compute(w["w"]))))
        == region.numel() * 4
    )


@pytest.mark.parametrize(
    "join",
    [
        lambda q, k, v: torch.cat([q, k, v]),
        lambda q, k, v: torch.stack([q, k, v]).flatten(0, 1),
        lambda q, k, v: nn.functional.pad(q, (0, 0, 0, 16), value=2.0),
        lambda q, k, v: q.roll(3, 0),
        lambda q, k, v: torch.cat([q, k, v])[torch.tensor([3, 2, 11, 12, 13, 9, 0, 1])],
        lambda q, k, v: k.index_select(0, torch.tensor([7, 6, 1, 0])),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_shard_of_what_is_joined_needs_its_parts_alone(
    join: Callable[..., Tensor], size: int
) -> None:
    whole = join(*(torch.zeros(8, 12),) * 3)
    rows = whole.shape[0] // size

    def load(param: Tensor, weights: dict[str, Tensor], rank: int) -> None:
        param.copy_(join(*weights.values())[rank * rows : (rank + 1) * rows])

    total = sum(pulled((rows, 12), partial(load, rank=rank), QKV) for rank in range(size))
    largest = torch.unique(join(*torch.arange(288.0).view(3, 8, 12).unbind())).numel() * 4
    assert total <= largest


def test_far_apart_parts_are_pulled_apart() -> None:
    def load(param: Tensor, weights: dict[str, Tensor]) -> None:
        gate, up = weights["w"].float().mul(2).chunk(2)
        param[:1].copy_(gate[:1])
        param[1:].copy_(up[3:])

    assert pulled((2, 12), load) == 96


def test_a_temporary_that_is_filled_by_shards_is_pulled_by_shards() -> None:
    def load(param: Tensor, weights: dict[str, Tensor]) -> None:
        whole = torch.zeros(16, 24)
        whole[:8, ::2] = weights["w"]
        whole[8:, 1::2] = -weights["w"]
        param.copy_(whole[6:10, 4:10])

    assert pulled((4, 6), load) == 2 * 3 * 4 + 2 * 3 * 4


def test_overlapping_reads_of_one_weight_are_pulled_once() -> None:
    for load in (
        lambda p, w: p.copy_(w["w"][:8] + w["w"].t().reshape(8, 12)),
        lambda p, w: p.copy_(w["w"] + w["w"].view(torch.int32)),
        lambda p, w: (p.copy_(w["w"]), p[1:].add_(w["w"][:-1])),
        lambda p, w: p.copy_(w["w"] - w["w"].mean(1, keepdim=True)),
    ):
        assert pulled((8, 12), load) == 384


@st.composite
def chains(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """Functions of a tensor, spelled by drawn steps that all keep its number of elements."""
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from(_STEPS))
        steps.append(step(draw))

    def chain(tensor: Tensor) -> Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return chain


def _axis(draw: st.DrawFn) -> int:
    return draw(st.integers(0, 2))


def _permuted(draw: st.DrawFn) -> Any:
    order = draw(st.permutations([0, 1, 2]))
    return lambda t: t.permute(order)


def _rolled(draw: st.DrawFn) -> Any:
    dim, by = _axis(draw), draw(st.integers(-5, 5))
    return lambda t: t.roll(by, dim)


def _split(draw: st.DrawFn) -> Any:
    dim, at = _axis(draw), draw(st.integers(0, 3))
    return lambda t: torch.cat([t.narrow(dim, at, t.shape[dim] - at), t.narrow(dim, 0, at)], dim)


def _gathered(draw: st.DrawFn) -> Any:
    dim, order = _axis(draw), draw(st.permutations(range(4)))
    return lambda t: t.index_select(dim, torch.tensor([*order, *range(4, t.shape[dim])]))


def _written(draw: st.DrawFn) -> Any:
    dim, at = _axis(draw), draw(st.integers(0, 3))

    def step(t: Tensor) -> Tensor:
        made = torch.zeros_like(t)
        made.copy_(t)
        made.select(dim, at).mul_(3)
        made.narrow(dim, 0, at).copy_(t.narrow(dim, t.shape[dim] - at, at))
        return made

    return step


def _flipped(draw: st.DrawFn) -> Any:
    dim = _axis(draw)
    return lambda t: t.flip(dim)


def _scaled(draw: st.DrawFn) -> Any:
    dim = _axis(draw)
    return lambda t: t * t.narrow(dim, 0, 1)


def _reshaped(draw: st.DrawFn) -> Any:
    shape = draw(st.sampled_from([(4, 8, 8), (8, 4, 8), (8, 8, 4), (4, 16, 4)]))
    return lambda t: t.reshape(shape)


_STEPS: list[Callable[[st.DrawFn], Any]] = [
    _permuted,
    _rolled,
    _split,
    _gathered,
    _written,
    _reshaped,
    lambda draw: torch.neg,
    lambda draw: lambda t: t.contiguous(),
    lambda draw: lambda t: t.double() + 1,
    lambda draw: lambda t: t.half(),
    _flipped,
    _scaled,
    lambda draw: lambda t: t.float().mul_(2),
]


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(0, 2), st.integers(0, 3), st.booleans())
def test_any_chain_of_steps_and_then_a_shard(
    chain: Callable[[Tensor], Tensor], dim: int, shard: int, twice: bool
) -> None:
    def compute(weight: Tensor) -> Tensor:
        made = chain(weight).chunk(4, dim)[shard]
        return made.narrow((dim + 1) % 3, 1, 2) if twice else made

    whole = torch.zeros(4, 8, 8)
    made = compute(whole)
    params = [ParamMeta("w", "float32", (4, 8, 8))]
    found = pulled(tuple(made.shape), lambda p, w: p.copy_(compute(w["w"])), params)
    assert found <= whole.nbytes
