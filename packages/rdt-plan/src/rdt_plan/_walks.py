"""Walks: nests of loops over positions, and how they are cut at borders that repeat.

A slice walks through the addresses of its tensor, a placement through the packed elements of its
slice. A dim of a tensor is a period of addresses with a border wherever a piece begins, and so is
a loop of a packed slice; `split` is all that cutting either needs.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Loop", "Walk", "split"]


class Loop(NamedTuple):
    """One loop of a walk: how many times it runs, and its step in both spaces."""

    times: int
    step: int
    twin_step: int


class Walk(NamedTuple):
    """Loops, outermost first, that move through two spaces at once.

    Attributes:
        at: first position in the space that is cut.
        twin: first position in the other space.
        loops: each runs more than once; no step is negative.
    """

    at: int
    twin: int
    loops: tuple[Loop, ...]

    def part(self, number: int, start: int, *loops: Loop) -> "Walk":
        """The walk with loop ``number`` begun at iteration ``start`` and replaced by ``loops``."""
        before = self.loops[number]
        kept = tuple(loop for loop in loops if loop.times > 1)
        return Walk(
            self.at + start * before.step,
            self.twin + start * before.twin_step,
            (*self.loops[:number], *kept, *self.loops[number + 1 :]),
        )


def split(walk: Walk, period: int, borders: Sequence[int]) -> Iterator[tuple[int, Walk]]:
    """Cut ``walk`` where its position crosses a border, into few walks that cross none.

    Args:
        walk: what to cut; every position is visited by exactly one of the results.
        period: after how many positions the borders repeat.
        borders: ascending from 0 to ``period``, both included.

    Yields:
        The number of the interval between two borders, and a walk that stays in it. Its positions
        count that interval alone: those of one period follow on those of the period before.

    >>> rows = Walk(0, 0, (Loop(12, 1, 1),))  # of 3 rows of 4, cut before their last column
    >>> for interval, part in split(rows, 4, (0, 3, 4)):
    ...     print(interval, part.at, part.twin, [tuple(loop) for loop in part.loops])
    0 0 0 [(3, 3, 4), (3, 1, 1)]
    1 0 3 [(3, 1, 4)]
    """
    for number, (count, step, twin_step) in enumerate(walk.loops):
        turns = period // step if 0 < step < period and period % step == 0 else count
        if turns < count:  # through whole periods: a body of those, and what is before and after
            head = -(walk.at % period // step) % turns
            body, tail = divmod(count - head, turns)
            inner = Loop(turns, step, twin_step)
            outer = Loop(body, period, turns * twin_step)
            for start, loops in (
                (0, (Loop(head, step, twin_step),)),
                (head, (outer, inner)),
                (count - tail, (Loop(tail, step, twin_step),)),
            ):
                if loops[0].times:
                    yield from split(walk.part(number, start, *loops), period, borders)
            return
    turn, low = divmod(walk.at, period)
    reach = [(loop.times - 1) * (loop.step % period) for loop in walk.loops]
    high = low + sum(reach)
    interval = bisect_right(borders, low) - 1
    if high < borders[interval + 1]:
        start, width = borders[interval], borders[interval + 1] - borders[interval]
        loops = tuple(
            Loop(count, step // period * width + step % period, twin_step)
            for count, step, twin_step in walk.loops
        )
        yield interval, Walk(turn * width + low - start, walk.twin, loops)
        return
    number = max(range(len(reach)), key=lambda each: walk.loops[each].step % period)
    count, step, twin_step = walk.loops[number]
    moved, inner_reach = step % period, sum(reach) - reach[number]
    start = 0
    while start < count:  # the longest run of iterations that cross no border, or one that does
        turn, phase = divmod(low + start * moved, period)
        room = borders[bisect_right(borders, phase)] - 1 - phase - inner_reach
        taken = min(room // moved + 1 if room >= 0 else 1, count - start)
        yield from split(walk.part(number, start, Loop(taken, step, twin_step)), period, borders)
        start += taken
