"""A fleet by hand: for simulations that compare one rule with its absence."""

from collections.abc import Collection, Mapping, Sequence

from rdt_plan.direct import DirectRule
from rdt_plan.groups import rank_schedule
from rdt_plan.identity import ConsumerId
from rdt_plan.manifest import Manifest, ParamMeta
from rdt_plan.placement import Placement
from rdt_plan.plan import SyncPlan, build_plan
from rdt_plan.slices import whole

__all__ = ["small_fleet"]

_OWNERS = ((0, 1), (0,), (1,), (0, 1, 2), (2,))  # by gather group


def small_fleet(
    num_slots: int = 2, direct: Collection[str] = (), num_modules: int = 1
) -> tuple[list[SyncPlan], Mapping[int, Sequence[int]]]:
    """Plans and each rank's groups: three ranks, five groups, replicas of 2, 2 and 1 workers.

    Each plan has ten chunks: two a group, of the names that end in a and b; those that end as
    ``direct`` says are direct. Workers of equal number have equal plans, so two rings serve all.
    Groups are dealt to ``num_modules`` modules: one makes one lane of each plan, five make several.
    """
    params = [ParamMeta(f"l.{i}.{c}", "int8", (8,), _OWNERS[i]) for i in range(5) for c in "ab"]
    manifest = Manifest.build(params)
    slices = [whole(param) for param in params]
    names = frozenset(param.name for param in params if param.name[-1] in direct)
    module_of = {param.name: f"m{manifest.group_of(param.name) % num_modules}" for param in params}
    rule = DirectRule(
        dict.fromkeys(range(3), names), frozenset((module_of[name], name) for name in names)
    )
    copies = [
        Placement(s, module_of[s.name], s.name, 0, s.shape, s.stride, s.dtype, s.stride)
        for s in slices
    ]
    plans = [
        build_plan(
            manifest,
            copies,
            ConsumerId(replica, worker),
            num_workers=num_workers,
            num_slots=num_slots,
            max_chunk_bytes=8,
            direct=rule,
            max_direct_bytes=8,
        )
        for replica, num_workers in enumerate((2, 2, 1))
        for worker in range(num_workers)
    ]
    return plans, {rank: rank_schedule(manifest, rank) for rank in range(3)}
