from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rdt_plan._walks import Loop, Walk, split


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    loop = st.builds(Loop, st.integers(2, 5), st.integers(0, 20), st.integers(0, 50))
    loops = draw(st.lists(loop, max_size=3).map(tuple))
    return Walk(draw(st.integers(0, 30)), draw(st.integers(0, 9)), loops)


def visited(walk: Walk) -> list[tuple[int, int]]:
    found = []
    for turns in product(*(range(loop.times) for loop in walk.loops)):
        at = sum(turn * loop.step for turn, loop in zip(turns, walk.loops, strict=True))
        twin = sum(turn * loop.twin_step for turn, loop in zip(turns, walk.loops, strict=True))
        found.append((walk.at + at, walk.twin + twin))
    return found


@given(walks(), st.sets(st.integers(1, 15), min_size=1, max_size=4))
def test_every_position_is_visited_once_where_it_lies(walk: Walk, ends: set[int]) -> None:
    borders = [0, *sorted(ends)]
    period = borders[-1]
    found = []
    for interval, part in split(walk, period, borders):
        assert all(loop.times > 1 for loop in part.loops)
        start, width = borders[interval], borders[interval + 1] - borders[interval]
        for local, twin in visited(part):
            turn, phase = divmod(local, width)
            found.append((turn * period + start + phase, twin))
    assert sorted(found) == sorted(visited(walk))


def parts(walk: Walk, period: int, borders: tuple[int, ...]) -> list[tuple[int, int, list]]:
    return [
        (interval, part.at, [tuple(loop)[:2] for loop in part.loops])
        for interval, part in split(walk, period, borders)
    ]


def test_usual_shapes_make_one_walk_an_interval() -> None:
    whole = Walk(0, 0, (Loop(24, 1, 1),))  # (4, 6)
    assert parts(whole, 24, (0, 12, 24)) == [(0, 0, [(12, 1)]), (1, 0, [(12, 1)])]
    assert parts(whole, 6, (0, 2, 6)) == [(0, 0, [(4, 2), (2, 1)]), (1, 0, [(4, 4), (4, 1)])]
    turned = Walk(0, 0, (Loop(6, 1, 4), Loop(4, 6, 1)))
    assert parts(turned, 6, (0, 2, 6)) == [(0, 0, [(2, 1), (4, 2)]), (1, 0, [(4, 1), (4, 4)])]
    narrow = Walk(1, 0, (Loop(4, 6, 3), Loop(3, 1, 1)))  # columns 1 to 3
    assert parts(narrow, 6, (0, 2, 6)) == [(0, 1, [(4, 2)]), (1, 0, [(4, 4), (2, 1)])]
    heads = Walk(0, 0, (Loop(3, 18, 6), Loop(6, 1, 1)))  # the first of each 3 rows of 6, of 9
    assert parts(heads, 54, (0, 27, 54)) == [(0, 0, [(2, 18), (6, 1)]), (1, 9, [(6, 1)])]


def test_a_merged_loop_has_a_head_a_body_and_a_tail() -> None:
    walk = Walk(4, 0, (Loop(19, 1, 1),))  # from column 4 of row 0 to column 4 of row 3, of 6
    assert parts(walk, 6, (0, 3, 6)) == [
        (1, 1, [(2, 1)]),
        (0, 3, [(2, 3), (3, 1)]),
        (1, 3, [(2, 3), (3, 1)]),
        (0, 9, [(3, 1)]),
        (1, 9, [(2, 1)]),
    ]
