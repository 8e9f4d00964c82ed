from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Fill, Placement, PlanError, Slice, check_write
from rdt_plan.testing import manifests, writes

SLICE = Slice("w", "bfloat16", 0, (6,), (1,))
COPY = Placement(SLICE, "m.a", "weight", 2, (2, 3), (5, 1), "bfloat16", (3, 1))
FILL = Fill("", "scale", 0, (2, 2), (4, 1), "float32", 0.0)


@given(st.data())
def test_drawn_writes_are_accepted(data: st.DataObject) -> None:
    for write in data.draw(writes(data.draw(manifests()))):
        check_write(write)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (COPY._replace(stride=(5,)), r"m\.a\.weight, from 'w': expected one stride a dim"),
        (COPY._replace(source_stride=(3, 1, 1)), "expected one stride a dim"),
        (COPY._replace(offset=-1), "no negative value"),
        (COPY._replace(shape=(2, -3)), "no negative value"),
        (COPY._replace(stride=(-5, 1)), "no negative value"),
        (COPY._replace(source_stride=(-3, 1)), "no negative value"),
        (COPY._replace(stride=(5, 0)), "written once"),
        (COPY._replace(dtype="half"), "unknown dtype 'half'"),
        (COPY._replace(source_stride=(4, 1)), "packed elements below 6, found one at 6"),
        (COPY._replace(source_stride=(3, 2)), "packed elements below 6, found one at 7"),
        (COPY._replace(shape=(3, 3), stride=(5, 1)), "below 6, found one at 8"),
        (replace(FILL, stride=(4, 0)), r"^scale: expected every destination element"),
        (replace(FILL, shape=(2,)), "one stride a dim"),
        (replace(FILL, offset=-4), "no negative value"),
    ],
)
def test_contradictions_are_refused_by_name(write, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_write(write)


def test_broadcasts_casts_and_empty_copies_are_fine() -> None:
    check_write(COPY._replace(shape=(4, 2, 3), stride=(10, 5, 1), source_stride=(0, 3, 1)))
    check_write(COPY._replace(dtype="float32"))
    check_write(COPY._replace(slice=Slice("w", "bfloat16", 0, (0,), (1,)), shape=(0, 3)))
    check_write(COPY._replace(shape=(), stride=(), source_stride=()))
