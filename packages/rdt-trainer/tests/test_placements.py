"""Who holds what of a tensor's views, against the elements themselves."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from rdt_plan import AxisPlacement, Manifest, ParamMeta
from rdt_plan.testing import over_a_mesh
from rdt_trainer.errors import SourceError
from rdt_trainer.named_views import Region
from rdt_trainer.placements import axis_placements, region_held, view_layout

RANKS = (0, 1, 2, 3, 4, 5)
View = Callable[[torch.Tensor], torch.Tensor]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)


def boxed(whole: torch.Tensor, meta: ParamMeta, rank: int) -> torch.Tensor | None:
    if (box := meta.box(rank)) is None:
        return None
    return whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A view, as a mapping of names makes them: some steps of a few kinds."""
    for _ in range(draw(st.integers(0, 3))):
        if not tensor.ndim:
            break
        dim = draw(st.integers(0, tensor.ndim - 1))
        match draw(st.sampled_from(["select", "narrow", "chunk", "turn", "flatten"])):
            case "select":
                tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
            case "narrow":
                start = draw(st.integers(0, tensor.shape[dim] - 1))
                count = draw(st.integers(1, tensor.shape[dim] - start))
                tensor = tensor.narrow(dim, start, count)
            case "chunk":
                parts = tensor.chunk(2, dim)
                tensor = parts[draw(st.integers(0, len(parts) - 1))]
            case "turn":
                tensor = tensor.transpose(dim, -1)
            case "flatten" if tensor.is_contiguous():
                tensor = tensor.flatten()
    return tensor


@given(st.data())
def test_a_view_of_shards_has_the_elements_of_the_view(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    meta = data.draw(over_a_mesh(ParamMeta("w", "int16", shape), RANKS))
    whole = numbered(shape)
    view = data.draw(views(whole))
    region = Region.of(view)
    try:
        layout = view_layout("v", region, meta)
    except SourceError as error:
        assert "v is a view of w" in str(error) and "ModuleSource" in str(error)
        event("refused")
        assume(False)
        return
    event("served")
    layout = Manifest.build([layout]).param("v")  # what it declares is consistent
    covered = torch.zeros(view.shape, dtype=torch.bool)
    for rank in layout.owners:
        expected = boxed(view, layout, rank)
        if expected is None:
            continue
        local = boxed(whole, meta, rank)
        assert local is not None
        held = region_held(region, meta, rank)(local.contiguous())
        assert torch.equal(held.reshape(expected.shape), expected)
        flags = boxed(covered, layout, rank)
        assert flags is not None
        flags.fill_(True)
    assert covered.all()


def test_a_tensor_that_nothing_cuts_has_views_on_all_its_owners() -> None:
    meta = ParamMeta("w", "int8", (4, 2), (1, 3), (2,), ("replicate",))
    region = Region.of(numbered((4, 2))[2])
    layout = view_layout("v", region, meta)
    assert (layout.owners, layout.mesh_shape, layout.placements) == ((1, 3), (), ())


@pytest.mark.parametrize(
    ("view", "cut", "message"),
    [
        (lambda t: t[1:3], "shard(0)", r"dim 0 ranks hold in pieces from \[0, 2\]"),
        (lambda t: t.flatten(), "shard(1)", r"dim 1 ranks hold in pieces from \[0, 3\]"),
        (lambda t: t[::3], "shard(0)", r"dim 0 ranks hold"),
        (lambda t: t[0, 1:4], "shard(1)", r"dim 1 ranks hold"),
    ],
)
def test_a_view_that_a_border_goes_through_is_refused(view: View, cut: str, message: str) -> None:
    meta = ParamMeta("w", "int8", (4, 6), (0, 1), (2,), (cut,))
    with pytest.raises(SourceError, match=rf"v is a view of w \[4, 6\], whose {message}"):
        view_layout("v", Region.of(view(numbered((4, 6)))), meta)


@pytest.mark.parametrize(
    "view",
    [lambda t: t[1:3, 3:], lambda t: t[1], lambda t: t.T[2], lambda t: t[1, 2], lambda t: t.T],
)
def test_a_view_within_pieces_or_with_whole_dims_is_served(view: View) -> None:
    meta = ParamMeta("w", "int8", (4, 6), (0, 1), (2,), ("shard(1)",))
    view_layout("v", Region.of(view(numbered((4, 6)))), meta)


def test_placements_have_one_spelling() -> None:
    placements = [AxisPlacement(None), AxisPlacement(1, 2), "shard(0)", "replicate"]
    expected = ("replicate", "shard(1,2)", "shard(0)", "replicate")
    assert axis_placements("w", placements, 2) == expected
