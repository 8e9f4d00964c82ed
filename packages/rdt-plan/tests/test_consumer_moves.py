"""Every state of a chunk at its consumer with every event: as the table says, or refused."""

from collections.abc import Collection
from itertools import product

import pytest

from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch
from rdt_plan.errors import ProtocolError
from rdt_plan.testing import read_chunks, snapshot
from rdt_plan.transitions import (
    ABORTING_TRANSITIONS,
    CHUNK_TRANSITIONS,
    ChunkEvent,
    ChunkState,
)


def epoch_of(owners: list[int], num_slots: int, direct: Collection[int] = ()) -> ConsumerEpoch:
    epoch = ConsumerEpoch(read_chunks(owners, num_slots, direct), num_slots)
    epoch.begin()
    return epoch


PATHS = {
    ChunkState.AWAITED: [],
    ChunkState.READING: [ChunkEvent.READY],
    ChunkState.HANDED_OUT: [ChunkEvent.READY, ChunkEvent.READ_DONE],
    ChunkState.SCATTERING: [ChunkEvent.READY, ChunkEvent.READ_DONE, ChunkEvent.SCATTER_ENQUEUED],
    ChunkState.INSTALLED: [
        ChunkEvent.READY,
        ChunkEvent.READ_DONE,
        ChunkEvent.SCATTER_ENQUEUED,
        ChunkEvent.SCATTER_COMPLETED,
    ],
}
DIRECT_PATHS = {
    ChunkState.AWAITED: [],
    ChunkState.READING: [ChunkEvent.READY],
    ChunkState.INSTALLED: [ChunkEvent.READY, ChunkEvent.READ_DONE],
}
OURS = (ChunkEvent.READY, ChunkEvent.POSTED, ChunkEvent.HANDED_OUT, ChunkEvent.DIRECT_READ_DONE)
DRIVER_EVENTS = [event for event in ChunkEvent if event not in OURS]
DIRECT = {ChunkEvent.READ_DONE: ChunkEvent.DIRECT_READ_DONE}  # what an event is to a direct chunk


def fire(epoch: ConsumerEpoch, event: ChunkEvent, index: int) -> list[ConsumerAction]:
    if event is ChunkEvent.READY:
        return epoch.ready(index, 0)
    method = getattr(epoch, event.value)
    failed = event in (ChunkEvent.READ_FAILED, ChunkEvent.SCATTER_FAILED)
    return method(index, "why") if failed else method(index)


@pytest.mark.parametrize("event", DRIVER_EVENTS)
def test_no_driver_may_move_a_chunk_that_landed_before_its_turn(event: ChunkEvent) -> None:
    epoch = epoch_of([0, 1], num_slots=2)
    for owner in (0, 1):
        epoch.ready(owner, 0)
    epoch.read_done(1)
    before = snapshot(epoch)
    with pytest.raises(ProtocolError):
        fire(epoch, event, 1)
    assert snapshot(epoch) == before


@pytest.mark.parametrize(
    ("state", "event", "aborting"), list(product(PATHS, DRIVER_EVENTS, (False, True)))
)
def test_every_move_follows_the_table_or_is_refused(
    state: ChunkState, event: ChunkEvent, aborting: bool
) -> None:
    """Chunk 0 is the one tried; chunk 1 is in flight, so that an abort does not end at once."""
    try_move(epoch_of([0, 1, 2], num_slots=3), PATHS[state], state, event, event, aborting)


@pytest.mark.parametrize(
    ("state", "event", "aborting"), list(product(DIRECT_PATHS, DRIVER_EVENTS, (False, True)))
)
def test_every_move_of_a_direct_chunk_follows_the_table_or_is_refused(
    state: ChunkState, event: ChunkEvent, aborting: bool
) -> None:
    epoch = epoch_of([0, 1, 2], num_slots=3, direct={0})
    try_move(epoch, DIRECT_PATHS[state], state, event, DIRECT.get(event, event), aborting)


def try_move(
    epoch: ConsumerEpoch,
    path: list[ChunkEvent],
    state: ChunkState,
    event: ChunkEvent,
    meaning: ChunkEvent,
    aborting: bool,
) -> None:
    for step in path:
        fire(epoch, step, 0)
    epoch.ready(1, 0)
    if aborting:
        epoch.abort("enough")
    before = snapshot(epoch)
    table = ABORTING_TRANSITIONS if aborting else CHUNK_TRANSITIONS
    if (state, meaning) in table:
        fire(epoch, event, 0)
        assert snapshot(epoch) != before
    else:
        with pytest.raises(ProtocolError):
            fire(epoch, event, 0)
        assert snapshot(epoch) == before
