"""Consumers that read one ring: each chunk is packed once, and its slot waits for all of them."""

from dataclasses import replace

import pytest

from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PlanError
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_epoch import Pack, ProducerEpoch, Ready, Release
from rdt_plan.testing import serve_table

A, B, C = ConsumerId(0, 0), ConsumerId(1, 0), ConsumerId(2, 0)
RING, OWN = "one plan", "another plan"


def epoch_of(groups_of_ring: list[int], num_slots: int = 2, lookahead: int = 0) -> ProducerEpoch:
    """A and B read one ring; C has its own, with one chunk of group 1."""
    tables = {c: serve_table(c, groups_of_ring, num_slots, RING) for c in (A, B)}
    return ProducerEpoch(tables | {C: serve_table(C, [1], num_slots, OWN)}, [0, 1], lookahead)


def pack(epoch: ProducerEpoch, seq: int, *readers: ConsumerId) -> None:
    assert epoch.pack_enqueued(RING, seq) == []
    assert epoch.packed(RING, seq) == [Ready(reader, seq) for reader in readers]


def test_a_chunk_is_packed_once_and_announced_to_every_reader() -> None:
    epoch = epoch_of([0])
    assert epoch.publish(0) == [Pack(RING, 0)]
    pack(epoch, 0, A, B)
    assert epoch.done(A, 0) == []
    assert epoch.done(B, 0) == [Release(0)]
    assert epoch.publish(1) == [Pack(OWN, 0)]
    epoch.pack_enqueued(OWN, 0)
    assert epoch.packed(OWN, 0) == [Ready(C, 0)]
    assert epoch.done(C, 0) == [Release(1), Finished()]


def test_a_fast_reader_is_ahead_of_a_slow_one_by_the_slots_only() -> None:
    epoch = epoch_of([0] * 4)
    epoch.publish(0)
    pack(epoch, 0, A, B)
    pack(epoch, 1, A, B)
    assert epoch.done(A, 0) == []
    assert epoch.done(A, 1) == []
    assert epoch.done(A, 1) == []  # a repeat is not the DONE of another reader
    assert epoch.done(B, 0) == [Pack(RING, 2)]
    assert epoch.waiting_for() == (
        "consumer r0w0: the pack of seq 2 (group 0, l.0.w) to be enqueued; "
        "consumer r1w0: DONE of seq 1 (group 0, l.0.w)"
    )


def test_a_dropped_reader_stops_counting_at_once() -> None:
    epoch = epoch_of([0] * 4)
    epoch.publish(0)
    pack(epoch, 0, A, B)
    epoch.done(A, 0)
    epoch.pack_enqueued(RING, 1)
    assert epoch.drop(B, "gone") == [Pack(RING, 2)]  # the slot of seq 0 was held by B alone
    assert epoch.packed(RING, 1) == [Ready(A, 1)]
    assert epoch.done(B, 0) == []
    assert epoch.done(A, 1) == [Pack(RING, 3)]
    pack(epoch, 2, A)
    pack(epoch, 3, A)
    assert epoch.done(A, 2) == []
    assert epoch.done(A, 3) == [Release(0)]


def test_the_last_reader_of_a_ring_leaves_only_its_packs() -> None:
    epoch = epoch_of([0, 0])
    epoch.publish(0)
    pack(epoch, 0, A, B)
    epoch.pack_enqueued(RING, 1)
    assert epoch.drop(A, "gone") == []
    assert epoch.drop(B, "gone") == []
    assert epoch.packed(RING, 1) == [Release(0)]


def test_a_reader_that_lost_a_pack_to_a_drop_of_the_other_still_gets_it() -> None:
    epoch = epoch_of([0])
    epoch.publish(0)
    assert epoch.drop(A, "gone") == []
    pack(epoch, 0, B)
    assert epoch.done(B, 0) == [Release(0)]


def test_a_failed_pack_names_every_reader() -> None:
    epoch = epoch_of([0])
    epoch.publish(0)
    assert epoch.pack_failed(RING, 0, "no memory") == [
        Quiesced("consumer r0w0, consumer r1w0: pack of seq 0 (group 0, l.0.w) failed: no memory")
    ]
    assert epoch.state is EpochState.QUIESCED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_slots": 3}, "in num_slots: expected 2, found 3"),
        ({"slot_bytes": 32}, "in slot_bytes: expected 16, found 32"),
        ({"chunks": serve_table(B, [0]).chunks}, "in its number of chunks: expected 2, found 1"),
        ({"chunks": serve_table(B, [0, 1]).chunks}, "in chunk 1: group: expected 0, found 1"),
    ],
)
def test_one_digest_for_two_tables_is_refused_by_name(change: dict, says: str) -> None:
    ours = serve_table(A, [0, 0], plan_digest=RING)
    theirs = replace(serve_table(B, [0, 0], plan_digest=RING), **change)
    with pytest.raises(PlanError, match=rf"consumer r1w0 claims plan {RING}.* {says};"):
        ProducerEpoch({A: ours, B: theirs}, [0, 1], 0)
