"""Gather groups: the parameters a trainer gathers, serves and releases together.

A group is cut by name alone: the prefix up to and including the outermost integer segment, so an
expert stays with its layer and two stacks of one model stay apart. Names without an integer
before the first indexed one form the group ``pre``, later ones the group ``post``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_plan.errors import ManifestError

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest

__all__ = [
    "POST",
    "PRE",
    "GatherGroup",
    "gather_groups",
    "group_key",
    "group_ordered",
    "group_schedule",
    "rank_schedule",
]

PRE = "pre"
POST = "post"


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Neighbouring parameters that are gathered, served and released as one.

    Attributes:
        index: position among the groups, in manifest order.
        key: ``"pre"``, ``"post"``, or the names' prefix up to their outermost integer.
        names: its parameters, in manifest order.
    """

    index: int
    key: str
    names: tuple[str, ...]


def group_key(name: str) -> str | None:
    """The prefix of ``name`` up to and including its outermost integer segment, or None.

    >>> group_key("model.layers.3.mlp.experts.7.w1")
    'model.layers.3'
    >>> group_key("lm_head.weight") is None
    True
    """
    segments = name.split(".")
    for position, segment in enumerate(segments):
        if segment.isascii() and segment.isdigit():
            return ".".join(segments[: position + 1])
    return None


def _keys(names: Iterable[str]) -> list[str]:
    """The group key of each name, ``pre`` and ``post`` included."""
    keys = []
    unindexed = PRE
    for name in names:
        key = group_key(name)
        if key is not None:
            unindexed = POST
        keys.append(unindexed if key is None else key)
    return keys


def gather_groups(names: Sequence[str]) -> tuple[GatherGroup, ...]:
    """Cut ``names`` into groups, which must be contiguous.

    Raises:
        ManifestError: a group is interrupted by another; names the first offender.

    >>> [group.key for group in gather_groups(["embed", "layers.0.w", "layers.1.w", "norm"])]
    ['pre', 'layers.0', 'layers.1', 'post']
    """
    members: dict[str, list[str]] = {}
    previous = None
    for name, key in zip(names, _keys(names), strict=True):
        if key != previous and key in members:
            raise ManifestError(
                f"gather group {key!r} is not contiguous: {name!r} follows a name of group "
                f"{previous!r}, expected it right after {members[key][-1]!r}; "
                f"deliver the parameters in the order of rdt_plan.group_ordered(names)"
            )
        members.setdefault(key, []).append(name)
        previous = key
    return tuple(
        GatherGroup(index, key, tuple(group)) for index, (key, group) in enumerate(members.items())
    )


def group_ordered(names: Iterable[str]) -> list[str]:
    """``names`` reordered so that groups are contiguous, moving no more than that.

    ``pre`` comes first, then the indexed groups by first appearance, then ``post``; within a
    group the order stays.

    >>> group_ordered(["a.0.w", "merger", "b.0.w", "a.0.b", "norm"])
    ['a.0.w', 'a.0.b', 'b.0.w', 'merger', 'norm']
    """
    names = list(names)
    members: dict[str, list[str]] = {PRE: []}
    last: list[str] = []
    for name, key in zip(names, _keys(names), strict=True):
        (last if key == POST else members.setdefault(key, [])).append(name)
    return [name for group in (*members.values(), last) for name in group]


def group_schedule(manifest: "Manifest") -> tuple[int, ...]:
    """The order in which groups are gathered and pulled: one permutation of their indices.

    A group's level is the length of the longest chain of earlier groups that share a rank with
    the next one; groups are sorted by (level, index). So groups of disjoint pipeline stages
    alternate, every rank gathers its own groups in manifest order, and a model whose ranks all
    hold everything keeps manifest order.

    >>> from rdt_plan import Manifest, ParamMeta
    >>> stages = [(0,), (0,), (1,), (1,)]
    >>> params = [ParamMeta(f"l.{i}.w", "int8", (1,), owners) for i, owners in enumerate(stages)]
    >>> group_schedule(Manifest.build(params))
    (0, 2, 1, 3)
    """
    next_level: dict[int, int] = {}
    levels = []
    for group in manifest.groups:
        ranks = manifest.ownership.ranks_of(group.index)
        level = max((next_level.get(rank, 0) for rank in ranks), default=0)
        next_level.update(dict.fromkeys(ranks, level + 1))
        levels.append(level)
    return tuple(sorted(range(len(levels)), key=lambda index: (levels[index], index)))


def rank_schedule(manifest: "Manifest", rank: int) -> tuple[int, ...]:
    """The groups of which ``rank`` holds something, in schedule order.

    >>> from rdt_plan import Manifest, ParamMeta
    >>> params = [ParamMeta(f"l.{i}.w", "int8", (1,), (i % 2,)) for i in range(4)]
    >>> rank_schedule(Manifest.build(params), 1)
    (1, 3)
    """
    ranks_of = manifest.ownership.ranks_of
    return tuple(group for group in group_schedule(manifest) if rank in ranks_of(group))
