import doctest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rdt_bake.regions
from rdt_bake.regions import Grid, Region, cells, merge


def positions(region: Region) -> set[int]:
    found = set(region.positions())
    assert len(found) == region.numel
    return found


def test_examples() -> None:
    assert doctest.testmod(rdt_bake.regions).failed == 0


def test_normal_spells_equal_sets_equally() -> None:
    table = torch.empty(4, 6)
    for view in (table, table.t(), table.view(2, 2, 6), table.reshape(-1)):
        assert Region.normal(0, view.shape, view.stride()) == Region(0, (24,), (1,))


def test_runs() -> None:
    assert Region.normal(5, (2, 3), (3, 1)).is_run
    assert not Region.normal(5, (2, 3), (4, 1)).is_run
    assert Region.normal(5, (2, 3), (4, 1)).stop == 12
    assert Region.normal(5, (), ()).is_run


@st.composite
def region_sets(draw: st.DrawFn) -> list[Region]:
    """Regions as loaders make them: boxes, with steps, of a tensor of up to three dims."""
    shape = [draw(st.sampled_from([1, 2, 4, 6])) for _ in range(draw(st.integers(1, 3)))]
    table = torch.empty(shape)
    regions = []
    for _ in range(draw(st.integers(1, 4))):
        view = table.view(-1) if draw(st.booleans()) else table
        for dim in range(view.ndim):
            lo = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, lo, draw(st.integers(1, view.shape[dim] - lo)))
            step = draw(st.sampled_from([1, 1, 2]))
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
        regions.append(Region.normal(view.storage_offset(), view.shape, view.stride()))
    return regions


@given(region_sets())
@settings(max_examples=200, deadline=None)
def test_cells_partition_the_union_and_name_their_regions(regions: list[Region]) -> None:
    grid = Grid.of(regions)
    if grid is None:
        return  # strides that do not divide each other; overlaps settles those by element
    boxes = []
    for label, region in enumerate(regions):
        found = grid.boxes(region)
        assert found is not None
        assert sorted(p for box in found for p in positions(grid.region(box))) == sorted(
            positions(region)
        )
        boxes += [(label, box) for box in found]
    owners: dict[int, frozenset[int]] = {}
    for box, labels in cells(boxes):
        for position in positions(grid.region(box)):
            assert position not in owners
            owners[position] = labels
    expected: dict[int, set[int]] = {}
    for label, region in enumerate(regions):
        for position in positions(region):
            expected.setdefault(position, set()).add(label)
    assert owners == expected


@given(region_sets())
@settings(max_examples=100, deadline=None)
def test_merging_keeps_the_union(regions: list[Region]) -> None:
    grid = Grid.of(regions)
    if grid is None:
        return
    found = [(n, box) for n, region in enumerate(regions) for box in grid.boxes(region) or ()]
    disjoint = [box for box, _ in cells(found)]
    merged = merge(disjoint)
    assert len(merged) <= len(disjoint)
    before = sorted(p for box in disjoint for p in positions(grid.region(box)))
    after = sorted(p for box in merged for p in positions(grid.region(box)))
    assert after == before


def test_strides_that_do_not_divide_each_other_have_no_grid() -> None:
    assert Grid.of([Region(0, (4,), (2,)), Region(0, (4,), (3,))]) is None
