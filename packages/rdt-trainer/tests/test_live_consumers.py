"""Consumers' numbers, as deployments; `tests/test_vllm_api.py` has syncs of some."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_trainer import SettingsError
from rdt_trainer.live_consumers import live_deployments


@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_whole_deployments_are_told_from_parts(data: st.DataObject, count: int, each: int) -> None:
    live = data.draw(st.sets(st.integers(0, count * each - 1), min_size=1))
    spans = [set(range(at * each, (at + 1) * each)) for at in range(count)]
    if all(span <= live or not span & live for span in spans):
        whole = {at for at, span in enumerate(spans) if span <= live}
        assert live_deployments(live, count * each, count) == whole
    else:
        with pytest.raises(SettingsError, match="expected all of them or none"):
            live_deployments(live, count * each, count)


@pytest.mark.parametrize(
    ("live", "num_consumers", "told"),
    [
        ([], 4, "is empty"),
        ([0, 4], 4, "names 4: expected numbers below the 4"),
        ([-1], 4, "names -1"),
        ([0], 0, "without num_consumers"),
    ],
)
def test_numbers_of_nobody_are_refused(live: list[int], num_consumers: int, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        live_deployments(live, num_consumers, 2)
