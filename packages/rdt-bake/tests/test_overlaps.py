import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rdt_bake.overlaps
from rdt_bake.overlaps import settle
from rdt_bake.regions import Region


def positions(region: Region) -> set[int]:
    found = set(region.positions())
    assert len(found) == region.numel
    return found


def run(lo: int, hi: int) -> Region:
    return Region.normal(lo, (hi - lo,), (1,))


WHOLE = run(0, 24)


def test_disjoint_runs_are_kept_and_gaps_reported() -> None:
    settled = settle([run(0, 6), run(10, 20)], [False, False], [WHOLE])
    assert settled.kept == {0: None, 1: None}
    assert settled.missing == ((run(6, 10), run(20, 24)),)


def test_a_region_written_twice_does_not_hide_one_never_written() -> None:
    settled = settle([run(0, 12), run(0, 12)], [False, False], [WHOLE])
    assert settled.kept == {1: None}
    assert settled.missing == ((run(12, 24),),)


def test_a_write_covered_by_several_later_ones_is_dead() -> None:
    settled = settle([run(4, 20), run(0, 12), run(12, 24)], [False] * 3, [WHOLE])
    assert settled.kept == {1: None, 2: None}
    assert settled.missing == ((),)


def test_a_fill_under_copies_stays_whole() -> None:
    settled = settle([WHOLE, run(3, 9)], [True, False], [WHOLE])
    assert settled.kept == {0: None, 1: None}


def test_a_copy_under_a_fill_is_cut() -> None:
    settled = settle([WHOLE, run(20, 24)], [False, True], [WHOLE])
    assert settled.kept == {0: (run(0, 20),), 1: None}


def test_a_fill_under_a_fill_is_cut_so_that_fills_need_no_order() -> None:
    settled = settle([WHOLE, run(3, 9)], [True, True], [WHOLE])
    assert settled.kept == {0: (run(0, 3), run(9, 24)), 1: None}


def test_columns_of_a_matrix() -> None:
    left = Region.normal(0, (4, 2), (6, 1))
    right = Region.normal(3, (4, 3), (6, 1))
    settled = settle([left, right], [False, False], [WHOLE])
    assert settled.kept == {0: None, 1: None}
    assert settled.missing == ((Region(2, (4,), (6,)),),)


@st.composite
def histories(draw: st.DrawFn):
    shape = [draw(st.sampled_from([2, 3, 4, 6])) for _ in range(draw(st.integers(1, 2)))]
    table = torch.empty(shape)
    writes, fills = [], []
    for _ in range(draw(st.integers(0, 5))):
        view = table.view(-1) if draw(st.booleans()) else table
        for dim in range(view.ndim):
            lo = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, lo, draw(st.integers(1, view.shape[dim] - lo)))
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        writes.append(Region.normal(view.storage_offset(), view.shape, view.stride()))
        fills.append(draw(st.booleans()))
    return writes, fills, Region.normal(0, table.shape, table.stride())


@given(histories())
@settings(max_examples=300, deadline=None)
def test_settled_writes_give_what_the_ordered_ones_gave(case) -> None:
    writes, fills, whole = case
    settled = settle(writes, fills, [whole])
    expected: dict[int, int] = {}
    for which, region in enumerate(writes):
        expected |= dict.fromkeys(positions(region), which)
    assert sorted(p for r in settled.missing[0] for p in positions(r)) == sorted(
        positions(whole) - expected.keys()
    )
    if settled.unsettled:
        return
    got: dict[int, int] = {}
    for kind in (True, False):  # fills first, otherwise backwards: order must not matter
        for which, parts in sorted(settled.kept.items(), reverse=True):
            if fills[which] is not kind:
                continue
            kept = positions(writes[which]) if parts is None else set()
            for part in parts or ():
                assert not kept & positions(part)
                kept |= positions(part)
            if kind is False:
                assert not any(not fills[got[p]] for p in kept & got.keys()), "copies overlap"
            got |= dict.fromkeys(kept, which)
    # A fill kept whole under another fill would show here.
    assert got == expected


def test_irregular_regions_are_settled_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    by_two, by_three = Region(0, (12,), (2,)), Region(0, (8,), (3,))
    settled = settle([by_two, by_three], [False, False], [WHOLE])
    parts = settled.kept[0]
    assert parts is not None and settled.unsettled == ()
    assert {part.offset for part in parts} == positions(by_two) - positions(by_three)
    settled = settle([by_two, by_three], [True, False], [WHOLE])
    assert (settled.kept, settled.unsettled) == ({0: None, 1: None}, ())
    lost = positions(WHOLE) - positions(by_two) - positions(by_three)
    assert {r.offset for r in settled.missing[0]} == lost
    monkeypatch.setattr(rdt_bake.overlaps, "MAX_PIECES", 7)
    assert settle([by_two, by_three], [False, False], [WHOLE]).unsettled == ((0, 1),)
    monkeypatch.setattr(rdt_bake.overlaps, "MAX_ELEMENTS", 8)
    assert settle([by_two, by_three], [True, False], [WHOLE]).unsettled == ((0, 1),)
