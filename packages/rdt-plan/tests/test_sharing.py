from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import ConsumerId, Slice, check_sharing
from rdt_plan.errors import PlanError
from rdt_plan.testing import serve_table

A, B = ConsumerId(0, 0), ConsumerId(1, 0)
FIELDS = ("seq", "group", "serve_slot", "num_bytes", "offsets", "slices")


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 3))
def test_tables_that_differ_in_their_consumer_only_may_share(groups: list, num_slots: int) -> None:
    check_sharing(serve_table(B, groups, num_slots, "p"), serve_table(A, groups, num_slots, "p"))


@given(st.integers(0, 2), st.sampled_from(FIELDS))
def test_any_other_difference_is_named(seq: int, field: str) -> None:
    table = serve_table(A, [0, 1, 2], 2, "p")
    [slice_] = table.chunks[seq].slices
    wrong = {"offsets": (16,), "slices": (Slice(slice_.name, "int8", 0, (3,), (1,)),)}
    chunks = list(table.chunks)
    chunks[seq] = replace(chunks[seq], **{field: wrong.get(field, 99)})
    what = {"offsets": "offset 0", "slices": "slice 0"}.get(field, field)
    with pytest.raises(
        PlanError, match=rf"r1w0 .* r0w0 .*differs in chunk {seq}: {what}: expected"
    ):
        check_sharing(replace(table, consumer=B, chunks=tuple(chunks)), table)


def test_another_plan_is_no_ring_mate() -> None:
    with pytest.raises(PlanError, match="differs in plan_digest: expected p, found q"):
        check_sharing(serve_table(B, [0], 2, "q"), serve_table(A, [0], 2, "p"))
