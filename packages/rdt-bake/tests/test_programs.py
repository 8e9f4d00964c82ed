"""Values that loaders compute, each against the loader itself."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rdt_bake import Recording
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
Action = Callable[[Tensor, Tensor], Any]


class Holder(nn.Module):
    """One parameter, and real buffers that loaders may look into."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("chosen", torch.tensor([True, False, True, True]))


def load_each(
    action: Action,
    into: tuple[int, ...] = (4, 6),
    *,
    of: tuple[int, ...] = (4, 6),
    dtype: str = "float32",
    made: torch.dtype = torch.float32,
) -> Recording:
    """The checked recording of ``action`` on the parameter's data and the weight ``w``."""

    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            action(model.w.data, weight)

    recording = check_recording(lambda: Holder(into, made), load, [ParamMeta("w", dtype, of)])
    recording.require_coverage()
    return recording


def computed(compute: Callable[[Tensor], Tensor]) -> Action:
    return lambda param, weight: param.copy_(compute(weight))


TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0])
ORDER = torch.tensor([3, 1, 2, 0])


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: -w,
        lambda w: -torch.exp(w.float()),
        lambda w: w + 1,
        lambda w: w.half(),
        lambda w: w.half().float().bfloat16().double(),
        lambda w: w.to(torch.float8_e8m0fnu).view(torch.uint8),
        lambda w: torch.cat([w[2:], w[:2]]),
        lambda w: torch.cat([w[:, 3:], -w[:, :3]], dim=1),
        lambda w: torch.stack([w[0], w[3], w[3], w[1]]),
        lambda w: torch.stack([w[:, 0], w[:, 1], w[:, 1]] * 2, dim=1),
        lambda w: torch.hstack([w[:, :3], w[:, 3:]]),
        lambda w: pad(w[:, :3], (1, 2)),
        lambda w: pad(w[1:3, 1:3], (1, 3, 2, 0), value=-1.5),
        lambda w: pad(w, (-1, 1)),
        lambda w: w[ORDER],
        lambda w: w[:, [5, 3, 1, 0, 2, 4]],
        lambda w: w[[-1, 0, 1, 2]],
        lambda w: w[ORDER[:, None], torch.tensor([5, 4, 3, 2, 1, 0])],
        lambda w: w.index_select(0, ORDER),
        lambda w: w.index_select(1, torch.tensor([0, 0, 2, 2, 4, 4])),
        lambda w: torch.gather(w, 0, ORDER[:, None].expand(4, 6)),
        lambda w: w[torch.tensor([True, False, True, True])].sum(0),
        lambda w: w.repeat_interleave(2, 0)[:4],
        lambda w: w[:, :2].repeat_interleave(3, 1),
        lambda w: w[:2].tile(2, 1),
        lambda w: w[:1, :2].repeat(4, 3),
        lambda w: w.roll(1, 0),
        lambda w: w.roll((1, -2), (0, 1)),
        lambda w: w.flip(0),
        lambda w: w.flip(0, 1),
        lambda w: w.t().contiguous().view(4, 6) + 1,
        lambda w: (w * 2).t().reshape(4, 6),
        lambda w: (w + w.t().reshape(4, 6)).T.contiguous().mT,
        lambda w: w.exp().unflatten(1, (2, 3)).movedim(1, 2).flatten(1),
        lambda w: w.neg().as_strided((4, 6), (1, 4)),
        lambda w: w.square().split([1, 3])[1].select(0, 1).expand(4, 6),
        lambda w: torch.narrow(torch.chunk(w.abs(), 2)[1].clone(), 1, 2, 3).repeat(2, 2),
        lambda w: torch.where(w > 0, w, w * 2),
        lambda w: w.masked_fill(w < 0, 0),
        lambda w: w - w.mean(dim=0, keepdim=True),
        lambda w: w / w.abs().max(),
        lambda w: w.sort(dim=1).values,
        lambda w: w.topk(3, dim=1).values.repeat(1, 2),
        lambda w: torch.tril(w),
        lambda w: w @ torch.eye(6),
        lambda w: torch.einsum("ab,bc->ac", w, torch.arange(36.0).view(6, 6)),
        lambda w: w * torch.arange(6.0),
        lambda w: w * w.new_tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        lambda w: w * torch.tensor(3, dtype=torch.float64),
        lambda w: TABLE[(w.abs().long() % 14)],
        lambda w: torch.arange(6, device=w.device) + w,
        lambda w: torch.zeros_like(w) + w.new_ones(6) * w,
    ],
)
def test_values(compute: Callable[[Tensor], Tensor]) -> None:
    recording = load_each(computed(compute))
    assert recording.consumed == {"w"}


def test_what_moves_no_value_about_needs_no_program() -> None:
    for move in (
        lambda w: w[:2].repeat(2, 1),
        lambda w: w[:, :3].tile(2),
        lambda w: w[:2].repeat_interleave(2, 0),
        lambda w: w[torch.arange(4)],
        lambda w: w.index_select(0, torch.tensor([0, 1, 2, 3])),
    ):
        assert load_each(computed(move)).programs == ()


def fill_parts(param: Tensor, weight: Tensor) -> None:
    whole = torch.zeros(4, 6)
    whole[:2].copy_(weight[2:])
    whole[2:, :3] = weight[:2, :3] * 2
    param.copy_(whole)


def fill_empty(param: Tensor, weight: Tensor) -> None:
    whole = torch.empty_like(weight)
    for row in range(4):
        whole[row] = weight[3 - row]
    param.copy_(whole.flatten().view(4, 6))


def fill_steps(param: Tensor, weight: Tensor) -> None:
    whole = weight.new_empty(4, 6)
    whole[:, 0::2] = weight[:, :3]
    whole[:, 1::2] = weight[:, 3:]
    param.copy_(whole)


def fill_real(param: Tensor, weight: Tensor) -> None:
    whole = torch.arange(24.0).view(4, 6)
    whole[1:3] = weight[1:3]
    whole += 1
    param.copy_(whole[:, :6])


def change_numbers(param: Tensor, weight: Tensor) -> None:
    numbers = torch.ones(6)
    param[:2].copy_(weight[:2] * numbers)
    numbers.data[2:].fill_(3)
    param[2].copy_(weight[2] * numbers)
    numbers += torch.arange(6.0)
    param[3].copy_(weight[3] * numbers)


def fill_in_turns(param: Tensor, weight: Tensor) -> None:
    whole = torch.zeros_like(weight)
    param[:2].copy_(whole[:2])
    whole.copy_(weight)
    param[2:].copy_(whole[:2])
    whole.zero_()
    param[0].copy_(whole[3])


@pytest.mark.parametrize(
    "action", [fill_parts, fill_empty, fill_steps, fill_real, change_numbers, fill_in_turns]
)
def test_temporaries_that_are_filled_in_parts(action: Action) -> None:
    load_each(action)


@pytest.mark.parametrize(
    "action",
    [
        lambda p, w: (w.zero_(), p.copy_(w)),
        lambda p, w: (w[0].fill_(3), p.copy_(w)),
        lambda p, w: (w.mul_(2), p.copy_(w)),
        lambda p, w: (w[1:, 2].mul_(w[0, 0]), p.copy_(w)),
        lambda p, w: (w.__setitem__(slice(2, 4), w[:2] * 3), p.copy_(w)),
        lambda p, w: (p.copy_(w), w.zero_(), p[0].copy_(w[0])),
        lambda p, w: (p.copy_(-w.clone().add_(1)), w.zero_()),
        lambda p, w: (w.clamp_(min=0), w.div_(2), p.copy_(w.T.contiguous().T)),
        lambda p, w: (w.half().zero_(), p.copy_(w)),
        lambda p, w: (w.index_fill_(0, ORDER[:2], 7), p.copy_(w)),
        lambda p, w: (w.t_().unsqueeze_(0), p.copy_(w[0].t())),
    ],
)
def test_loaders_that_write_into_the_source(action: Action) -> None:
    load_each(action)


@pytest.mark.parametrize(
    "action",
    [
        lambda p, w: (p.copy_(w), p.copy_(-torch.exp(p.float()))),
        lambda p, w: (p.copy_(w), p.add_(1).mul_(w)),
        lambda p, w: (p[:2].copy_(w[2:]), p[2:].copy_(p[:2] * 2)),
        lambda p, w: (p.copy_(w), p[0].copy_(p[1]), p[1].copy_(p.t()[:, 3])),
        lambda p, w: (p.copy_(w), p.copy_(p.t().reshape(4, 6))),
        lambda p, w: (p.zero_(), p[1:3].add_(w[1:3])),
        lambda p, w: p.index_put_((ORDER,), w),
        lambda p, w: p.__setitem__(ORDER, w),
        lambda p, w: p.__setitem__([3, 2, 1, 0], w),
        lambda p, w: p.__setitem__((slice(None), [5, 4, 3, 2, 1, 0]), w),
        lambda p, w: p.index_copy_(0, ORDER, w),
        lambda p, w: (p.copy_(w), p.index_fill_(1, torch.tensor([0, 5]), 2)),
        lambda p, w: (p.copy_(w), p.masked_fill_(torch.eye(4, 6).bool(), 2)),
        lambda p, w: (p.copy_(w), p.masked_fill_(w > 0, 0.5)),
        lambda p, w: p.scatter_(0, ORDER[:, None].expand(4, 6), w),
        lambda p, w: torch.add(w, w, out=p),
        lambda p, w: (p.copy_(w), p[0].copy_(torch.arange(6.0))),
        lambda p, w: torch._foreach_copy_(list(p.unbind()), [row * 2 for row in w.unbind(0)]),
        lambda p, w: (p.copy_(w), torch._foreach_mul_(list(p.unbind()), 2)),
    ],
)
def test_what_loaders_do_to_their_own_parameter(action: Action) -> None:
    load_each(action)


def test_constants_of_the_model_as_operands() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.w.data.zero_()
            model.w.data[model.chosen] = weight[model.order][:3] * 2
            model.w.data[1].copy_(weight[model.chosen].sum(0))

    params = [ParamMeta("w", "float32", (4, 6))]
    check_recording(lambda: Holder((4, 6), torch.float32), load, params).require_coverage()


def test_a_part_that_is_never_written_is_noticed() -> None:
    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.w.data[:2].copy_(-weight[:2])
            model.w.data[:2].copy_(weight[2:])
            model.w.data[3, torch.tensor([5, 0])] = weight[0, :2]

    params = [ParamMeta("w", "float32", (4, 6))]
    recording = check_recording(lambda: Holder((4, 6), torch.float32), load, params)
    (lacking,) = recording.uncovered
    assert (lacking.num_missing, lacking.bounds) == (10, ((2, 4), (0, 6)))


def test_a_padded_vocabulary_stays_zero_in_the_padding() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(128, 8, dtype=torch.bfloat16), False)

    def load(model: Padded, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.zero_()
            model.weight.data[:100] = weight.float().mul(2)

    recording = check_recording(Padded, load, [ParamMeta("w", "bfloat16", (100, 8))])
    recording.require_coverage()
    assert recording.bytes_pulled == 1600


def test_zero_elements_and_zero_dims() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
            self.scalar = nn.Parameter(torch.zeros(()), requires_grad=False)
            self.one = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load(model: Odd, pairs: Pairs) -> None:
        weights = dict(pairs)
        model.empty.data.copy_(weights["w"][:0] * 2)
        scale = weights["scale"].reciprocal()
        model.scalar.data.copy_(torch.cat([weights["w"][:0].flatten(), scale.view(1)])[0])
        model.one.data.copy_(torch.max(weights["scale"], scale).double())

    params = [ParamMeta("w", "float32", (2, 3)), ParamMeta("scale", "float32", ())]
    recording = check_recording(Odd, load, params)
    recording.require_coverage()
    assert recording.bytes_pulled == 4
