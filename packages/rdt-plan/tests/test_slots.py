import copy
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan.errors import ProtocolError
from rdt_plan.slots import SLOT_TRANSITIONS, SlotEvent, SlotRing, SlotState


def ring_in(state: SlotState, num_rounds: int = 0) -> SlotRing:
    """A ring of two whose slot 0 went round ``num_rounds`` times and is now in ``state``."""
    ring = SlotRing(2)
    for use in range(num_rounds):
        generation = ring.acquire(0, use)
        ring.enqueued(0, generation)
        ring.completed(0, generation)
    if state is not SlotState.FREE:
        generation = ring.acquire(0, num_rounds)
        if state is SlotState.DRAINING:
            ring.enqueued(0, generation)
    assert ring.state(0) is state
    return ring


def fire(ring: SlotRing, event: SlotEvent, slot: int, generation: int) -> None:
    if event is SlotEvent.ACQUIRED:
        ring.acquire(slot, 99)
    elif event is SlotEvent.ENQUEUED:
        ring.enqueued(slot, generation)
    else:
        ring.completed(slot, generation)


@pytest.mark.parametrize(("state", "event"), list(product(SlotState, SlotEvent)))
def test_every_move_follows_the_table_or_is_refused(state: SlotState, event: SlotEvent) -> None:
    ring = ring_in(state, 1)
    generation = 1 if state is SlotState.FREE else 2
    before = copy.deepcopy(vars(ring))
    if (state, event) in SLOT_TRANSITIONS:
        fire(ring, event, 0, generation)
        assert ring.state(0) is SLOT_TRANSITIONS[state, event]
    else:
        with pytest.raises(ProtocolError, match="slot 0"):
            fire(ring, event, 0, generation)
        assert vars(ring) == before


@pytest.mark.parametrize(
    ("state", "event", "generation"),
    list(product(SlotState, (SlotEvent.ENQUEUED, SlotEvent.COMPLETED), (-1, 0, 1, 3))),
)
def test_only_the_present_generation_counts(
    state: SlotState, event: SlotEvent, generation: int
) -> None:
    ring = ring_in(state, 1)
    before = copy.deepcopy(vars(ring))
    with pytest.raises(ProtocolError, match="slot 0"):
        fire(ring, event, 0, generation)
    assert vars(ring) == before


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    ring = SlotRing(2)
    for event in SlotEvent:
        with pytest.raises(ProtocolError, match="does not exist"):
            fire(ring, event, slot, 1)
    with pytest.raises(ProtocolError):
        ring.state(slot)
    with pytest.raises(ProtocolError):
        ring.use(slot)


def test_a_ring_has_slots() -> None:
    with pytest.raises(ProtocolError, match="num_slots"):
        SlotRing(0)


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(SlotEvent), st.integers(0, 2))))
def test_uses_never_overlap(num_slots: int, events: list[tuple[SlotEvent, int]]) -> None:
    """Whatever is fired, a slot is acquired only after its last use was enqueued and completed."""
    ring = SlotRing(num_slots)
    history: list[list[SlotEvent]] = [[] for _ in range(num_slots)]
    generations = [0] * num_slots
    for use, (event, number) in enumerate(events):
        slot = number % num_slots
        try:
            if event is SlotEvent.ACQUIRED:
                generation = ring.acquire(slot, use)
                assert generation == generations[slot] + 1
                assert ring.use(slot) == use
                generations[slot] = generation
            else:
                fire(ring, event, slot, generations[slot])
        except ProtocolError:
            continue
        history[slot].append(event)
    for rounds in history:
        assert rounds == (list(SlotEvent) * len(rounds))[: len(rounds)]
