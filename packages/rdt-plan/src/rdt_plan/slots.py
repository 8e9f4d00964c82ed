"""The slot ring of a consumer: when a receive slot may be overwritten.

A slot goes round ``FREE -> FILLING -> DRAINING -> FREE``: it is acquired for a READ, the scatter
that reads it is enqueued, and the event recorded after that scatter completes. An event knows only
its last record, so asking it before its scatter was enqueued answers for an *earlier* use of the
slot. Hence each use has a generation, and completing a generation whose scatter has not been
enqueued, or an older one, is refused.
"""

from enum import Enum

from rdt_plan.errors import ProtocolError

__all__ = ["SLOT_TRANSITIONS", "SlotEvent", "SlotRing", "SlotState"]


class SlotState(Enum):
    """Where a slot is in its round."""

    FREE = "free"
    FILLING = "filling"  #: a READ writes it, or its bytes wait for their scatter.
    DRAINING = "draining"  #: the scatter that reads it is enqueued.


class SlotEvent(Enum):
    """What happens to a slot."""

    ACQUIRED = "acquired"
    ENQUEUED = "enqueued"
    COMPLETED = "completed"


SLOT_TRANSITIONS = {
    (SlotState.FREE, SlotEvent.ACQUIRED): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.ENQUEUED): SlotState.DRAINING,
    (SlotState.DRAINING, SlotEvent.COMPLETED): SlotState.FREE,
}


class SlotRing:
    """``num_slots`` slots, numbered from 0; every method raises `ProtocolError` on misuse.

    An error leaves the ring as it was.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ProtocolError(f"num_slots: expected at least 1, found {num_slots}")
        self._states = [SlotState.FREE] * num_slots
        self._generations = [0] * num_slots
        self._uses: list[int | None] = [None] * num_slots

    def state(self, slot: int) -> SlotState:
        self._check_slot(slot)
        return self._states[slot]

    def use(self, slot: int) -> int | None:
        """What the slot was last acquired for; None when it never was."""
        self._check_slot(slot)
        return self._uses[slot]

    def acquire(self, slot: int, use: int) -> int:
        """Take a free slot for ``use`` (a chunk's index); returns the generation of this use."""
        self._move(slot, SlotEvent.ACQUIRED, None)
        self._generations[slot] += 1
        self._uses[slot] = use
        return self._generations[slot]

    def enqueued(self, slot: int, generation: int) -> None:
        """The scatter that reads this use of the slot has been enqueued."""
        self._move(slot, SlotEvent.ENQUEUED, generation)

    def completed(self, slot: int, generation: int) -> None:
        """The event recorded after the scatter of this use has completed: the slot is free."""
        self._move(slot, SlotEvent.COMPLETED, generation)

    def _move(self, slot: int, event: SlotEvent, generation: int | None) -> None:
        self._check_slot(slot)
        if generation is not None and generation != self._generations[slot]:
            raise ProtocolError(
                f"slot {slot}: {event.value} for generation {generation}, "
                f"but generation {self._generations[slot]} holds it (use {self._uses[slot]})"
            )
        state = self._states[slot]
        if (state, event) not in SLOT_TRANSITIONS:
            raise ProtocolError(
                f"slot {slot} (use {self._uses[slot]}) is {state.value}: "
                f"it cannot be {event.value} now"
            )
        self._states[slot] = SLOT_TRANSITIONS[state, event]

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._states):
            raise ProtocolError(f"slot {slot} does not exist: there are {len(self._states)} slots")
