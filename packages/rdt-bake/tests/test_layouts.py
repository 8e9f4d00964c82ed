import doctest
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rdt_bake.layouts
from rdt_bake.layouts import MAX_PIECES, Layout, Piece, join_dims


def test_examples() -> None:
    assert doctest.testmod(rdt_bake.layouts).failed == 0


def test_join_keeps_order_and_drops_single_extents() -> None:
    assert join_dims([(3, 1, 1), (1, 5, 7), (2, 3, 3)]) == ((3, 1, 1), (2, 3, 3))
    assert join_dims([(1, 1, 1)]) == ()
    # Mergeable on one side only: stays.
    assert join_dims([(2, 3, 30), (3, 1, 1)]) == ((2, 3, 30), (3, 1, 1))


def test_dims_must_nest() -> None:
    with pytest.raises(ValueError, match="nest"):
        Layout((3, 3), (1, 2))


def test_a_view_that_leaves_the_layout_is_refused() -> None:
    rows = Layout((4, 3), (10, 1))
    assert rows.trace(0, (4, 3), (10, 1)) is not None
    assert rows.trace(3, (1,), (1,)) is None  # the gap between rows
    assert rows.trace(40, (), ()) is None  # past the end
    assert rows.trace(0, (5,), (10,)) is None


def elements(piece: Piece, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Index in the view -> index in the layout, for every element of a piece."""
    found = {}
    for at in product(*map(range, piece.shape)):
        view = list(piece.start)
        layout = list(piece.index)
        for steps, (axis, step), move in zip(at, piece.steps, piece.moves, strict=True):
            view[axis] += steps * step
            layout = [x + steps * m for x, m in zip(layout, move, strict=True)]
        assert tuple(view) not in found
        assert all(x < n for x, n in zip(layout, shape, strict=True))
        found[tuple(view)] = tuple(layout)
    return found


@st.composite
def layouts_and_views(draw: st.DrawFn):
    """A layout (any dim order, with gaps), and a view of the tensor it lays out."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    gaps = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step = step * shape[dim] + gaps[dim]
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    laid = torch.arange(size).as_strided(shape, stride)
    if draw(st.booleans()) and not any(gaps):
        view = torch.arange(size)  # the dense memory, in memory order
    else:
        view = laid
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.ndim - 1))
        kind = draw(st.sampled_from(["slice", "step", "split", "transpose", "unfold"]))
        extent = view.shape[dim]
        if kind == "slice":
            lo = draw(st.integers(0, extent - 1))
            view = view.narrow(dim, lo, draw(st.integers(1, extent - lo)))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "split":
            inner = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            view = view.unflatten(dim, (extent // inner, inner))
        elif kind == "transpose":
            view = view.transpose(0, dim)
        else:
            size = draw(st.integers(1, extent))
            view = view.unfold(dim, size, draw(st.integers(1, 2)))
    return shape, tuple(stride), view


@given(layouts_and_views())
@settings(max_examples=300, deadline=None)
def test_pieces_are_the_view_element_by_element(case) -> None:
    shape, stride, view = case
    pieces = Layout(shape, stride).trace(view.storage_offset(), view.shape, view.stride())
    if pieces is None:
        assert view.numel() > MAX_PIECES  # single elements are always pieces
        return
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for piece in pieces:
        part = elements(piece, shape)
        assert not found.keys() & part.keys()
        found |= part
    assert found.keys() == set(product(*map(range, view.shape)))
    for at, index in found.items():
        position = sum(i * s for i, s in zip(index, stride, strict=True))
        assert view[at] == position


def test_a_flat_run_of_whole_rows_is_one_piece() -> None:
    pieces = Layout((1000, 512), (512, 1)).trace(3 * 512, (900 * 512,), (1,))
    assert pieces is not None
    assert [piece.spans() for piece in pieces] == [((3, 903), (0, 512))]


def test_a_ragged_run_is_three_pieces() -> None:
    pieces = Layout((1000, 512), (512, 1)).trace(100, (900 * 512,), (1,))
    assert pieces is not None
    assert sorted(piece.spans() for piece in pieces) == [
        ((0, 1), (100, 512)),
        ((1, 900), (0, 512)),
        ((900, 901), (0, 100)),
    ]
