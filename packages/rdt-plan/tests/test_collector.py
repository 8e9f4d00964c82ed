"""The collector is paused, and left as it was found."""

import gc

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
