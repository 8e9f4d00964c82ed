from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.pauses import Pauses, sharpen_pauses

SHORTEST, BUSY, LIVELY, IDLE = 20e-6, 200e-6, 1e-3, 0.05


def settled(pauses: Pauses, start: float, *, busy: bool, urgent: bool = True) -> float:
    """The pause after many polls in a moment that found nothing."""
    for _ in range(20):
        pauses.polled(start, happened=False, busy=busy, urgent=urgent)
    return pauses.seconds


def test_what_happened_makes_the_next_pause_the_shortest() -> None:
    pauses = Pauses(IDLE, eager=False)
    assert settled(pauses, 0.0, busy=False) == LIVELY
    pauses.polled(1.0, happened=True, busy=False, urgent=False)
    assert pauses.seconds == SHORTEST


def test_pauses_grow_to_how_urgent_the_wire_is() -> None:
    for eager in (False, True):
        pauses = Pauses(IDLE, eager=eager)
        pauses.polled(0.0, happened=True, busy=True, urgent=True)
        assert settled(pauses, 0.004, busy=True) == (SHORTEST if eager else BUSY)
        assert settled(pauses, 0.004, busy=True, urgent=False) == BUSY
        assert settled(pauses, 0.006, busy=True) == BUSY
        assert settled(pauses, 0.9, busy=False) == LIVELY
        assert settled(pauses, 1.1, busy=False) == IDLE
        assert settled(pauses, 1.1, busy=True) == BUSY


def test_an_idle_wire_is_not_polled_less_because_it_is_lively() -> None:
    assert settled(Pauses(1e-4, eager=False), 0.0, busy=False) == 1e-4


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.booleans(), st.booleans(), st.booleans())),
    st.booleans(),
)
def test_a_busy_wire_never_waits_half_a_millisecond(
    polls: list[tuple[float, bool, bool, bool]], eager: bool
) -> None:
    pauses, now = Pauses(IDLE, eager=eager), 0.0
    for later, happened, busy, urgent in polls:
        now += later
        pauses.polled(now, happened=happened, busy=busy, urgent=urgent)
        if busy:
            assert SHORTEST <= pauses.seconds <= BUSY


def test_sharpening_is_harmless_everywhere() -> None:
    sharpen_pauses()
