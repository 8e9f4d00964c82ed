"""Lanes: the chunks of a plan that keep an order among themselves, and wait for no others.

A consumer reads and scatters the slotted chunks of one lane in plan order, and those of different
lanes as they come. So a pipeline stage that is slow does not hold up what another one serves.

An owner's chunks keep their order, a module's must, and those in one receive slot. Owners that none
of this ties together are of different lanes. A plan deals its receive slots to lanes, so there are
no more of these; and it ties owners that take turns for the same names, which gather together.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

__all__ = ["Lane", "lanes_of", "slots_of"]


@dataclass(slots=True)
class Lane:
    """The slotted chunks of one lane, in plan order, and how many of them are through a stage."""

    slotted: list[int] = field(default_factory=list)
    num_posted: int = 0
    num_handed_out: int = 0


def lanes_of(chunks: Iterable[tuple[int, Iterable[Hashable]]]) -> dict[int, int]:
    """The lane of each owner, from the owner of each slotted chunk and what may tie it to others.

    Lanes are numbered by first appearance.

    >>> lanes_of([(0, ["embed"]), (2, ["head"]), (0, ["experts"]), (1, ["experts"])])
    {0: 0, 2: 1, 1: 0}
    """
    tied: dict[int, int] = {}  # an owner that each owner is tied to; a root, to itself
    first_owner: dict[Hashable, int] = {}

    def root(owner: int) -> int:
        while tied[owner] != owner:
            tied[owner] = tied[tied[owner]]
            owner = tied[owner]
        return owner

    for owner, ties in chunks:
        tied.setdefault(owner, owner)
        for tie in ties:
            other = first_owner.setdefault(tie, owner)
            if other != owner:
                tied[root(owner)] = root(other)
    numbers: dict[int, int] = {}
    return {owner: numbers.setdefault(root(owner), len(numbers)) for owner in tied}


def slots_of(lane: int, num_lanes: int, num_slots: int) -> range:
    """The receive slots of a lane, which its chunks take in turn.

    >>> [list(slots_of(lane, num_lanes=2, num_slots=5)) for lane in range(2)]
    [[0, 2, 4], [1, 3]]
    """
    return range(lane, num_slots, num_lanes)
