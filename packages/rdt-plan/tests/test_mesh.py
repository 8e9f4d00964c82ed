from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rdt_plan import AxisPlacement, Box, OwnershipError
from rdt_plan.mesh import Grid, grid_of
from rdt_plan.testing import mesh_placements

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.none() | st.integers(0, 20), st.integers(1, 999))
def test_a_placement_has_one_spelling(dim: int | None, factor: int) -> None:
    axis = AxisPlacement(dim, 1 if dim is None else factor)
    assert AxisPlacement.parse(str(axis)) == axis


@pytest.mark.parametrize(
    "text",
    [
        *("", "Replicate", "replicate ", "shard()", "shard(-1)", "shard(01)", "shard(0,1)"),
        *("shard(0,0)", "shard(0, 2)", "shard(0,02)", "shard(٣)", "shard(99999)"),
        *("shard(0)shard(1)", "Shard(dim=0)"),
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(OwnershipError, match=r"expected 'replicate', 'shard\(DIM\)'"):
        AxisPlacement.parse(text)


def boxes(grid: Grid) -> list[Box | None]:
    return [None if cell is None else grid.box(cell) for cell in grid.cells]


@given(st.data())
def test_the_boxes_of_different_owners_are_equal_or_disjoint_and_cover_the_tensor(data) -> None:
    shape, mesh_shape = data.draw(SHAPES), data.draw(MESHES)
    axes = data.draw(mesh_placements(shape, mesh_shape))
    try:
        grid = grid_of(shape, mesh_shape, tuple(map(str, axes)))
    except OwnershipError as error:
        assert "strided shards" in str(error)
        assume(False)
        return
    assert len(grid.cells) == prod(mesh_shape)
    covered: dict[tuple[int, ...], Box] = {}
    for box in set(boxes(grid)) - {None}:
        assert box is not None
        assert 0 not in box.shape
        for at in product(*map(range, box.shape)):
            index = tuple(a + b for a, b in zip(at, box.start, strict=True))
            assert covered.setdefault(index, box) == box
    assert set(covered) == set(product(*map(range, shape)))
    repeats = [size for axis, size in zip(axes, mesh_shape, strict=True) if axis.dim is None]
    for cell in set(grid.cells) - {None}:
        assert grid.cells.count(cell) % prod(repeats) == 0


def test_rows_and_columns_cut_unevenly() -> None:
    grid = grid_of((5, 7), (2, 3), ("shard(0)", "shard(1)"))
    assert grid.borders == ((0, 3, 5), (0, 3, 6, 7))
    assert boxes(grid)[5] == Box((3, 6), (2, 1))


def test_the_last_pieces_may_be_empty() -> None:
    assert grid_of((3,), (4,), ("shard(0)",)).cells == ((0,), (1,), (2,), None)
    assert grid_of((9,), (4,), ("shard(0)",)).borders == ((0, 3, 6, 9),)
    assert set(grid_of((0, 2), (2,), ("replicate",)).cells) == {None}


def test_two_axes_that_cut_one_dim() -> None:
    outer_first = grid_of((8,), (2, 2), ("shard(0)", "shard(0)"))
    assert [box and box.start for box in boxes(outer_first)] == [(0,), (2,), (4,), (6,)]
    inner_first = grid_of((8,), (2, 2), ("shard(0,2)", "shard(0)"))
    assert [box and box.start for box in boxes(inner_first)] == [(0,), (4,), (2,), (6,)]
    # 10 rows: pieces of 5, of which the second halves are 3 and 2
    uneven = grid_of((10,), (2, 2), ("shard(0)", "shard(0)"))
    assert uneven.borders == ((0, 3, 5, 8, 10),)


def test_a_strided_shard_over_two_inner_axes_cuts_last() -> None:
    grid = grid_of((16,), (2, 2, 2), ("shard(0,4)", "shard(0)", "shard(0)"))
    starts = [box and box.start[0] for box in boxes(grid)]
    assert starts == [0, 4, 8, 12, 2, 6, 10, 14]


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "message"),
    [
        ((8,), (2,), ("shard(0,2)",), r"make on the same dim, of \[1\], found 2"),
        ((8,), (2, 2), ("shard(0,3)", "shard(0)"), r"of \[1, 2\], found 3"),
        ((8, 8), (2, 2), ("shard(0,2)", "shard(1)"), r"of \[1\], found 2"),
        ((9,), (4, 2), ("shard(0,2)", "shard(0)"), r"cut 9 rows .* where FSDP2 holds"),
        ((8,), (2,), ("shard(1)",), "to cut dims"),
        ((), (2,), ("shard(0)",), "to cut dims"),
        ((8,), (2,), (), "one placement an axis"),
        ((8,), (0,), ("shard(0)",), "extents from 1"),
        ((8,), (-1,), ("shard(0)",), "extents from 1"),
    ],
)
def test_what_is_no_grid_is_refused(shape, mesh_shape, placements, message: str) -> None:
    with pytest.raises(OwnershipError, match=message):
        grid_of(shape, mesh_shape, placements)


def test_an_uneven_strided_shard_on_which_both_agree_is_fine() -> None:
    grid = grid_of((7,), (2, 2), ("shard(0,2)", "shard(0)"))
    assert boxes(grid) == [Box((a,), (n,)) for a, n in ((0, 2), (4, 2), (2, 2), (6, 1))]
