from collections.abc import Mapping
from enum import Enum

import pytest

from rdt_plan.slots import SLOT_TRANSITIONS, SlotState
from rdt_plan.transitions import (
    ABORTING_TRANSITIONS,
    CHUNK_TRANSITIONS,
    SERVE_TRANSITIONS,
    ChunkEvent,
    ChunkState,
    ServeState,
)

Table = Mapping[tuple[Enum, Enum], Enum]


@pytest.mark.parametrize(
    ("table", "start", "ends"),
    [
        (CHUNK_TRANSITIONS, ChunkState.AWAITED, {ChunkState.INSTALLED, ChunkState.LOST}),
        (ABORTING_TRANSITIONS, ChunkState.READING, {ChunkState.LOST}),
        (SERVE_TRANSITIONS, ServeState.QUEUED, {ServeState.READ, ServeState.LOST}),
        (SLOT_TRANSITIONS, SlotState.FREE, set()),
    ],
)
def test_only_the_ends_have_no_way_on(table: Table, start: Enum, ends: set[Enum]) -> None:
    reached = {start}
    while True:
        more = {after for (state, _), after in table.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert {state for state in reached if not any(s is state for s, _ in table)} == ends


@pytest.mark.parametrize(
    ("table", "start"),
    [(CHUNK_TRANSITIONS, ChunkState.AWAITED), (SERVE_TRANSITIONS, ServeState.QUEUED)],
)
def test_every_state_is_reached(table: Table, start: Enum) -> None:
    assert {start, *table.values()} == set(type(start))


def test_after_an_abort_nothing_that_lands_counts() -> None:
    changed = {
        key for key in CHUNK_TRANSITIONS if CHUNK_TRANSITIONS[key] != ABORTING_TRANSITIONS[key]
    }
    assert changed == {
        (ChunkState.READING, ChunkEvent.READ_DONE),
        (ChunkState.READING, ChunkEvent.DIRECT_READ_DONE),
    }
    assert CHUNK_TRANSITIONS.keys() == ABORTING_TRANSITIONS.keys()
