import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_trainer.errors import SourceError
from rdt_trainer.named_views import NamedView, Region, regions

FUSED = (4, 6, 5)  # experts, gate beside up, hidden


def fused_views() -> list[NamedView]:
    return [
        NamedView(f"experts.{expert}.{part}", lambda t, e=expert, p=part: t[e].chunk(2)[p == "up"])
        for expert in range(4)
        for part in ("gate", "up")
    ]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[NamedView]]:
    """A shape, and views that were split off recursively, some of them transposed or strided."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    views = []

    def split(view, extents: tuple[int, ...], depth: int) -> None:
        kind = draw(st.sampled_from(("leaf", "cut", "unbind", "stride", "transpose")))
        dim = draw(st.integers(0, len(extents) - 1)) if extents else 0
        if depth == 0 or not extents or kind == "leaf":
            views.append(NamedView(f"part{len(views)}", view))
        elif kind == "transpose":
            swapped = list(extents)
            swapped[0], swapped[dim] = swapped[dim], swapped[0]
            split(lambda t: view(t).transpose(0, dim), tuple(swapped), depth - 1)
        elif kind == "unbind":
            for index in range(extents[dim]):
                rest = extents[:dim] + extents[dim + 1 :]
                split(lambda t, i=index: view(t).select(dim, i), rest, depth - 1)
        elif kind == "cut":
            at = draw(st.integers(0, extents[dim]))
            for start, size in ((0, at), (at, extents[dim] - at)):
                part = (*extents[:dim], size, *extents[dim + 1 :])
                split(lambda t, s=start, n=size: view(t).narrow(dim, s, n), part, depth - 1)
        else:
            for start in range(min(2, extents[dim])):
                index = (*(slice(None),) * dim, slice(start, None, 2))
                part = (*extents[:dim], math.ceil((extents[dim] - start) / 2), *extents[dim + 1 :])
                split(lambda t, i=index: view(t)[i], part, depth - 1)

    split(lambda t: t, shape, draw(st.integers(0, 3)))
    return shape, views


@given(partitions(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_partition_is_complete_and_serves_what_the_views_show(partition, data):
    shape, views = partition
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    base = torch.cat([torch.full((3,), -1), tensor.flatten()])[3:].view(shape)  # with an offset
    found = regions("w", shape, tensor.dtype, views)
    for named, region in zip(views, found, strict=True):
        assert torch.equal(region(base), named.view(tensor))
        assert region(base).untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert region.is_contiguous == named.view(tensor).is_contiguous()

    index = data.draw(st.integers(0, len(views) - 1))
    if math.prod(found[index].shape):
        left_out = views[:index] + views[index + 1 :]
        with pytest.raises(SourceError, match=r"element \[.*\] of w .*none"):
            regions("w", shape, tensor.dtype, left_out)
        with pytest.raises(SourceError, match="again repeats elements of w"):
            regions("w", shape, tensor.dtype, [*views, NamedView("again", views[index].view)])


def test_the_element_left_out_is_named():
    with pytest.raises(SourceError, match=r"element \[2, 3, 0\] of w \[4, 6, 5\]"):
        regions("w", FUSED, torch.bfloat16, [v for v in fused_views() if v.name != "experts.2.up"])


def test_views_that_balance_a_gap_with_a_repetition_are_refused():
    views = [NamedView("a", lambda t: t[:2]), NamedView("b", lambda t: t[1:3])]
    with pytest.raises(SourceError, match=r"element \[3\] of w"):
        regions("w", (4,), torch.float32, views)


@pytest.mark.parametrize(
    ("view", "problem"),
    [
        (lambda t: t.clone(), "is a new tensor"),
        (lambda t: t.transpose(0, 1).contiguous(), "is a new tensor"),
        (lambda t: t.transpose(1, 2).reshape(4, 30), "is a new tensor"),
        (lambda t: -t, "is a new tensor"),
        (lambda t: t.to(torch.float32), "is a new tensor"),
        (lambda t: t[[0, 1]], "is a new tensor"),
        (lambda t: torch.zeros(4), "is a new tensor"),
        (lambda t: t.view(torch.int16), "reads its torch.bfloat16 as something else"),
        (lambda t: t[:1].expand(4, 6, 5), "repeats elements"),
        (lambda t: t.as_strided((4, 6, 6), (36, 6, 1)), "reaches beyond its 120 elements"),
        (lambda t: t[9], "failed on a meta tensor with IndexError"),
        (lambda t: t[: int(t.sum())], "failed on a meta tensor"),
        (lambda t: t.chunk(2), "is a tuple"),
    ],
)
def test_what_is_no_view_is_refused_naming_both(view, problem):
    with pytest.raises(SourceError, match=rf"^experts\.0, a view of mlp\.w, {problem}"):
        regions("mlp.w", FUSED, torch.bfloat16, [NamedView("experts.0", view)])


def test_elements_repeated_within_one_view_are_refused():
    views = [NamedView("windows", lambda t: t.as_strided((3, 2), (1, 1)))]
    with pytest.raises(SourceError, match="windows repeats elements of w"):
        regions("w", (4,), torch.float32, views)


def test_a_view_that_changes_its_mind_is_served_as_it_was_checked():
    rows = [0]
    views = [NamedView("first", lambda t: t[rows[0]]), NamedView("last", lambda t: t[1])]
    first, _ = regions("w", (2, 3), torch.float32, views)
    rows[0] = 1
    assert torch.equal(first(torch.arange(6.0).view(2, 3)), torch.arange(3.0))


def test_experts_of_any_size_are_checked_without_their_memory():
    views = [
        NamedView(f"{expert}.{half}", lambda t, e=expert, h=half: t[e].chunk(2)[h].t())
        for expert in range(64)
        for half in range(2)
    ]
    found = regions("w", (64, 2 << 20, 1 << 20), torch.bfloat16, views)  # 256 TiB
    assert found[3] == Region((1 << 20) * (3 << 20), (1 << 20, 1 << 20), (1, 1 << 20))
