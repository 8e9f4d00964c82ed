"""The collector is paused, and left as it was found."""

import gc
import weakref

import pytest

from rdt_plan.collector import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_found(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_whoever_finds_it_off_neither_turns_it_off_again_nor_on() -> None:
    """Two threads pause it: one found it off, and goes on when the other has turned it on again."""
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()


class Thing:
    """What the collector looks at."""


def generation_of(thing: object) -> int | None:
    return next(
        (n for n in range(3) if any(each is thing for each in gc.get_objects(generation=n))), None
    )


@pytest.mark.parametrize("stays", [True, False])
def test_what_stays_goes_to_the_oldest_generation_at_once(stays: bool) -> None:
    gc.collect()
    assert not gc.get_freeze_count()
    with collector_paused(stays=stays):
        thing, garbage = Thing(), Thing()
        garbage.itself = garbage  # type: ignore[attr-defined]
        found = weakref.ref(garbage)
        del garbage
        assert generation_of(thing) == 0
    assert not gc.get_freeze_count()
    gc.collect(0)
    assert (generation_of(thing) == 2) == stays
    gc.collect()
    assert found() is None


def test_what_is_frozen_stays_frozen() -> None:
    frozen = Thing()
    gc.freeze()
    try:
        with collector_paused(stays=True):
            thing = Thing()
        assert generation_of(thing) is not None
        assert gc.get_freeze_count()
        assert generation_of(frozen) is None
    finally:
        gc.unfreeze()
