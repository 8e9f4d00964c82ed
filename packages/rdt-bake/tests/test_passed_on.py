"""Copies from one of the model's tensors to another."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake import ComputedValueError, record
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
PARAMS = [ParamMeta("w", "float32", (6, 8)), ParamMeta("t", "bfloat16", (8, 6))]


class Tied(nn.Module):
    """An embedding and an output layer with a weight each, and another of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.low = nn.Module(), nn.Module(), nn.Module()
        self.embed.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.head.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.low.weight = nn.Parameter(torch.zeros(8, 8).bfloat16(), requires_grad=False)


def test_a_tied_layer_is_filled_from_the_weights_themselves() -> None:
    def load(model: Tied, pairs: Pairs) -> None:
        weights = dict(pairs)
        model.embed.weight.data[:6].copy_(weights["w"])
        model.embed.weight.data[6:].fill_(7)
        model.low.weight.data.fill_(0)
        model.head.weight.data.copy_(model.embed.weight.data)

    recording = check_recording(Tied, load, PARAMS)
    recording.require_coverage()
    assert recording.programs == () and recording.ignored == ("t",)
    assert {each.slice for each in recording.placements} == {recording.placements[0].slice}


@st.composite
def views(draw: st.DrawFn) -> tuple[slice, slice, bool]:
    """Rows and columns of an 8x8 tensor, perhaps transposed."""
    cuts = [
        slice(start, draw(st.integers(start + 1, 8)), draw(st.integers(1, 3)))
        for start in (draw(st.integers(0, 7)), draw(st.integers(0, 7)))
    ]
    return cuts[0], cuts[1], draw(st.booleans())


def seen(tensor: Tensor, view: tuple[slice, slice, bool]) -> Tensor:
    rows, columns, transposed = view
    found = tensor[rows, columns]
    return found.T if transposed else found


EVERYTHING = slice(0, 8, 1), slice(0, 8, 1)


@settings(max_examples=60)
@example(
    writes=[("flat", (slice(3, 4), slice(2, 5), False))],
    read=(*EVERYTHING, True),
    later=(*EVERYTHING, False),
)
@given(
    writes=st.lists(st.tuples(st.sampled_from(["w", "t", "number", "flat"]), views()), max_size=4),
    read=views(),
    later=views(),
)
def test_what_is_passed_on_is_what_was_there(
    writes: list[tuple[str, tuple[slice, slice, bool]]],
    read: tuple[slice, slice, bool],
    later: tuple[slice, slice, bool],
) -> None:
    """Overlapping writes of copies, casts and numbers; what comes later does not count."""

    def load(model: Tied, pairs: Pairs) -> None:
        weights = dict(pairs)
        embed, head = model.embed.weight.data, model.head.weight.data
        embed.fill_(3)
        for name, view in writes:
            into = seen(embed, view)
            if name == "flat":  # a run of elements that ends in the middle of a row
                start, stop = view[0].start, 8 * view[1].start + view[1].stop
                flat = weights["w"].reshape(-1)[: max(stop - start, 0)]
                embed.view(-1)[start : start + len(flat)].copy_(flat)
                continue
            if name == "number":
                into.fill_(5)
                continue
            source = weights[name]
            if source.shape[0] < into.shape[0] or source.shape[1] < into.shape[1]:
                source = source.T
            rows = min(into.shape[0], source.shape[0])
            columns = min(into.shape[1], source.shape[1])
            into[:rows, :columns].copy_(source[:rows, :columns])
        value = seen(embed, read)
        head[: value.shape[0], : value.shape[1]].copy_(value)
        seen(embed, later).fill_(9)

    recording = check_recording(Tied, load, PARAMS, exempt=lambda module, param: True)
    assert recording.programs == ()


@pytest.mark.parametrize("how", ["computed", "unwritten", "cast"])
def test_what_is_no_copy_of_weights_is_refused(how: str) -> None:
    def load(pairs: Pairs) -> None:
        weights = dict(pairs)
        if how == "computed":
            model.embed.weight.data[:6].copy_(weights["w"])
            model.embed.weight.data[2:3].mul_(2)
        else:
            model.embed.weight.data[: 5 if how == "unwritten" else 6].copy_(
                weights["w"][: 5 if how == "unwritten" else 6]
            )
        into = model.low.weight if how == "cast" else model.head.weight
        into.data[:6].copy_(model.embed.weight.data[:6])

    model = Tied()
    with pytest.raises(ComputedValueError, match=r"embed\.weight"):
        record(model, load, PARAMS, exempt=lambda module, param: True)
