"""What the one group schedule is for: other orders end in a cycle of waits."""

from dataclasses import replace

import pytest

from rdt_plan.simulate import simulate
from rdt_plan.testing import small_fleet


def test_gathering_in_different_orders() -> None:
    report = simulate([], {0: [0, 1], 1: [1, 0]}, lookahead=0, seed=0)
    assert [each.partition(":")[0] for each in report.violations] == ["nothing can happen any more"]


@pytest.mark.parametrize("shared", [True, False])
def test_reading_owners_in_another_order(shared: bool) -> None:
    """Its tables are those of worker 0, so no producer can see it.

    ``shared``: it claims the plan of worker 0 as well, and reads its rings.
    """
    plans, groups = small_fleet(num_slots=1)
    mine = plans[-1]
    reordered = sorted(mine.chunks, key=lambda chunk: (-chunk.owner, chunk.index))
    chunks = tuple(
        replace(chunk, index=index, receive_slot=0) for index, chunk in enumerate(reordered)
    )
    other = replace(mine, chunks=chunks)
    if shared:
        vars(other)["digest"] = mine.digest
    found = [
        simulate([*plans[:-1], other], groups, lookahead=0, seed=seed).violations
        for seed in range(20)
    ]
    waits = [each[0] for each in found if each]
    assert len(waits) > 10
    assert all(
        "nothing can happen any more" in each and "READY not received" in each for each in waits
    )
