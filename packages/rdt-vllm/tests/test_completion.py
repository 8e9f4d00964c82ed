"""Which chunk completes a unit, where lanes bring the chunks of tied modules in any order."""

from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
from torch import nn

from rdt_plan import ConsumerId, Fill, Manifest, ParamMeta, Placement, SyncPlan, build_plan, whole
from rdt_vllm.completion import Completion

NAMES = ("l.0.embed", "l.1.w", "l.2.head")  # one chunk each, of a rank each


@dataclass(eq=False)
class Unit:
    """As much of a unit as is asked for."""

    paths: tuple[str, ...]
    is_live: bool = False

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {path: nn.Module() for path in self.paths}


@dataclass
class Units:
    all: tuple[Unit, ...]
    of: dict[str, Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.of = {path: unit for unit in self.all for path in unit.paths}


def plan_of(*extra: Any) -> SyncPlan:
    params = [ParamMeta(name, "int8", (4,), (rank,)) for rank, name in enumerate(NAMES)]
    copies = [Placement(s, s.name, "w", 0, (4,), (1,), "int8", (1,)) for s in map(whole, params)]
    manifest = Manifest.build(params)
    return build_plan(manifest, [*copies, *extra], ConsumerId(0, 0), num_workers=1, num_slots=3)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_tied_modules_are_complete_with_the_last_of_their_chunks(order) -> None:
    tied, alone = Unit(("l.0.embed", "l.2.head")), Unit(("l.1.w",))
    units: Any = Units((tied, alone))
    plan = plan_of()
    completion = Completion(plan, units)
    for _ in range(2):  # and so in every sync, also after one that was given up
        completion.begin()
        completion.scattered(plan.chunks[order[0]])
        completion.begin()
        came: set[int] = set()
        for index in order:
            came.add(index)
            complete = completion.scattered(plan.chunks[index])
            assert (tied in complete) is (index != 1 and came >= {0, 2})
            assert (alone in complete) is (index == 1)


def test_live_units_count_only_with_something_to_compute() -> None:
    live, computing = Unit(("l.0.embed",), is_live=True), Unit(("l.1.w",), is_live=True)
    unread, head = Unit(("l.3.filled",)), Unit(("l.2.head",))
    units: Any = Units((live, computing, head, unread))
    fills = [Fill(path, "bias", 0, (1,), (1,), "int8", 0) for path in ("l.1.w", "l.3.filled")]
    plan = plan_of(*fills)
    completion = Completion(plan, units)
    completion.begin()
    assert [completion.scattered(chunk) for chunk in plan.chunks] == [[], [computing], [head]]
    assert completion.unread == [unread]
