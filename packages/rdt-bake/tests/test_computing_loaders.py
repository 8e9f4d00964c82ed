"""Miniatures of loaders that unpack, scale, interleave or reduce, each for every rank."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
RANKS = 2

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_VALUES = torch.cat([FP4, -FP4]).bfloat16()


def dequantise(weights: dict[str, Tensor]) -> Tensor:
    """int8 with one scale a row."""
    return (weights["w"].float() * weights["scale"][:, None]).bfloat16()


def dequantise_blocks(weights: dict[str, Tensor]) -> Tensor:
    """A float8 with one scale a block of 2 x 4."""
    scale = weights["scale"].repeat_interleave(2, 0).repeat_interleave(4, 1)
    return (weights["w"].to(torch.float32) * scale).to(torch.bfloat16)


def unpack_fp4(weights: dict[str, Tensor]) -> Tensor:
    """Two 4-bit floats a byte, low one first, looked up in a table; an exponent a block."""
    blocks, exponents = weights["blocks"], weights["scales"].to(torch.int32) - 127
    values = blocks.new_empty(*blocks.shape[:-1], blocks.shape[-1] * 2, dtype=torch.bfloat16)
    table = FP4_VALUES.to(blocks.device)
    values[..., 0::2] = table[(blocks & 0x0F).to(torch.long)]
    values[..., 1::2] = table[(blocks >> 4).to(torch.long)]
    return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(1).bfloat16()


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack_awq(weights: dict[str, Tensor]) -> Tensor:
    """Eight 4-bit numbers an int32, in an odd order, into int8."""
    shifts = torch.arange(0, 32, 4, device=weights["qweight"].device)
    numbers = (weights["qweight"][:, :, None] >> shifts[None, None, :]) & 0xF
    numbers = numbers.view(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER]
    return numbers.reshape(numbers.shape[0], -1).to(torch.int8)


def repack_gptq(weights: dict[str, Tensor]) -> Tensor:
    """Unpacked along rows, transposed, and packed along the other dim."""
    packed = weights["qweight"]
    numbers = torch.stack([(packed >> 4 * at) & 0xF for at in range(8)], dim=1).flatten(0, 1)
    numbers = numbers.t().contiguous()
    again = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int32)
    for at in range(8):
        again |= numbers[:, at::8] << 4 * at
    return again


def interleave_qkv(weights: dict[str, Tensor]) -> Tensor:
    """Heads of q, k, v side by side become one tensor each, then one behind another."""
    heads = weights["qkv"].view(4, 3, 2, -1)
    return torch.cat([part.reshape(8, -1) for part in heads.permute(1, 0, 2, 3).unbind()])


def rotate_halves(weights: dict[str, Tensor]) -> Tensor:
    """The pairs of a rotary embedding from interleaved to halves, head by head."""
    w = weights["w"]
    return w.view(4, 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape) * 1.0


def plus_one(weights: dict[str, Tensor]) -> Tensor:
    return weights["w"] + 1


def patches(weights: dict[str, Tensor]) -> Tensor:
    """A convolution over patches as a matrix, padded to a wider one."""
    flat = weights["conv"].flatten(1)
    return torch.cat([flat, torch.zeros((flat.shape[0], 4), dtype=flat.dtype)], dim=-1)


Case = tuple[Callable[[dict[str, Tensor]], Tensor], list[ParamMeta]]

CASES: dict[str, Case] = {
    "int8": (dequantise, [ParamMeta("w", "int8", (8, 12)), ParamMeta("scale", "float32", (8,))]),
    "fp8-blocks": (
        dequantise_blocks,
        [ParamMeta("w", "float8_e4m3fn", (8, 16)), ParamMeta("scale", "float32", (4, 4))],
    ),
    "fp4": (
        unpack_fp4,
        [ParamMeta("blocks", "uint8", (8, 2, 8)), ParamMeta("scales", "uint8", (8, 2))],
    ),
    "awq": (unpack_awq, [ParamMeta("qweight", "int32", (8, 2))]),
    "gptq": (repack_gptq, [ParamMeta("qweight", "int32", (2, 16))]),
    "qkv": (interleave_qkv, [ParamMeta("qkv", "bfloat16", (24, 6))]),
    "rotary": (rotate_halves, [ParamMeta("w", "float32", (16, 6))]),
    "plus-one": (plus_one, [ParamMeta("w", "bfloat16", (8,))]),
    "patches": (patches, [ParamMeta("conv", "bfloat16", (8, 3, 2, 2))]),
}


class Sharded(nn.Module):
    def __init__(self, shape: Iterable[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(tuple(shape), dtype=dtype), requires_grad=False)


def shard_bytes(case: Case, dim: int, rank: int) -> int:
    """Bytes that one rank pulls to hold its shard along ``dim``, checked."""
    compute, params = case
    whole = compute({p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in params})
    shard = whole.chunk(RANKS, dim)[rank]

    def load(model: Sharded, pairs: Pairs) -> None:
        model.w.data.copy_(compute(dict(pairs)).chunk(RANKS, dim)[rank])

    recording = check_recording(lambda: Sharded(shard.shape, whole.dtype), load, params)
    recording.require_coverage()
    return recording.bytes_pulled


@pytest.mark.parametrize("name", CASES)
def test_ranks_pull_little_more_than_the_weights_together(name: str) -> None:
    total = sum(param.num_bytes for param in CASES[name][1])
    pulled = sum(shard_bytes(CASES[name], 0, rank) for rank in range(RANKS))
    assert pulled <= 1.05 * total


@pytest.mark.parametrize("name", [name for name in CASES if name != "plus-one"])
def test_ranks_that_split_columns(name: str) -> None:
    for rank in range(RANKS):
        assert shard_bytes(CASES[name], 1, rank) > 0


def test_one_scale_for_several_shards() -> None:
    """The largest of the scales that were loaded so far, as fused layers keep it."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), False)
            self.weight_scale = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.input_scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load(model: Fused, pairs: Pairs) -> None:
        loaded: list[Any] = list(pairs)
        for at, (name, value) in enumerate(loaded):
            if name.endswith("scale"):
                model.weight_scale.data[at % 3].copy_(value.reshape(()))
            else:
                scaled = value.float() * loaded[at + 3][1]
                model.weight.data[2 * at : 2 * at + 2].copy_(scaled)
        model.input_scale.data.copy_(model.weight_scale.data.max().reciprocal())

    params = [ParamMeta(f"w{at}", "float8_e4m3fn", (2, 4)) for at in range(3)]
    params += [ParamMeta(f"w{at}.scale", "float32", (1,)) for at in range(3)]
    recording = check_recording(Fused, load, params)
    recording.require_coverage()
    assert recording.bytes_pulled == 3 * 8 + 3 * 4
