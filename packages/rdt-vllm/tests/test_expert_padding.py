"""Padding that experts declare is filled with zeros, and nothing else is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rdt_bake
from rdt_bake import Uncovered
from rdt_plan import Fill, Placement, Slice
from rdt_vllm.expert_padding import with_expert_padding

EXPERTS, WIDTH, LOADED, HIDDEN = 2, 8, 5, 3
GATE_UP = Uncovered("experts", "w13_weight", (2, 16, 3), 2 * 2 * 3 * 3, ((0, 2), (5, 16), (0, 3)))
UP = Uncovered("experts", "w13_weight", (2, 8, 3), 2 * 3 * 3, ((0, 2), (5, 8), (0, 3)))
DOWN = Uncovered("experts", "w2_weight", (2, 3, 8), 2 * 3 * 3, ((0, 2), (0, 3), (5, 8)))


def model(rows: int = 2 * WIDTH, **widths: int | None) -> nn.Module:
    made = nn.Module()
    experts: Any = nn.Module()
    experts.w13_weight = nn.Parameter(torch.ones(EXPERTS, rows, HIDDEN).bfloat16())
    experts.w2_weight = nn.Parameter(torch.ones(EXPERTS, HIDDEN, WIDTH).bfloat16())
    experts.moe_config = SimpleNamespace(
        **{
            "intermediate_size_per_partition": WIDTH,
            "intermediate_size_per_partition_unpadded": LOADED,
            **widths,
        }
    )
    made.experts = experts
    return made


def recording(*uncovered: Uncovered) -> rdt_bake.Recording:
    read = Slice("w", "bfloat16", 0, (3,), (1,))
    write = Placement(read, "experts", "w2_weight", 0, (3,), (1,), "bfloat16", (1,))
    return rdt_bake.Recording((write,), frozenset({"w"}), (), (), uncovered)


def test_declared_padding_becomes_fills_before_the_copies() -> None:
    made = recording(GATE_UP, DOWN)
    found = with_expert_padding(made, model())
    assert found.uncovered == ()
    assert found.writes == (
        Fill("experts", "w13_weight", 0, (2, 16, 3), (48, 3, 1), "bfloat16", 0.0),
        Fill("experts", "w2_weight", 0, (2, 3, 8), (24, 8, 1), "bfloat16", 0.0),
        *made.writes,
    )
    assert with_expert_padding(recording(UP), model(WIDTH)).uncovered == ()


@pytest.mark.parametrize(
    ("lacking", "widths"),
    [
        (GATE_UP, {"intermediate_size_per_partition_unpadded": WIDTH}),
        (GATE_UP, {"intermediate_size_per_partition_unpadded": None}),
        (GATE_UP, {"intermediate_size_per_partition_unpadded": LOADED + 1}),
        (GATE_UP, {"intermediate_size_per_partition": WIDTH - 1}),
        (Uncovered("experts", "w2_weight", (2, 3, 8), 17, ((0, 2), (0, 3), (5, 8))), {}),
        (Uncovered("experts", "w2_weight", (2, 3, 8), 18, ((0, 2), (0, 3), (4, 8))), {}),
        (Uncovered("experts", "w3_weight", (2, 3, 8), 18, ((0, 2), (0, 3), (5, 8))), {}),
        (Uncovered("", "w2_weight", (2, 3, 8), 18, ((0, 2), (0, 3), (5, 8))), {}),
    ],
)
def test_whatever_else_is_missing_stays_missing(
    lacking: Uncovered, widths: dict[str, int | None]
) -> None:
    made = recording(lacking)
    assert with_expert_padding(made, model(**widths)) == made
