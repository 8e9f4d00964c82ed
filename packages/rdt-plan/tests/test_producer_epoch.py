from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError, PlanError, ProtocolError
from rdt_plan.identity import ConsumerId
from rdt_plan.producer_epoch import Pack, ProducerEpoch, Ready, Release
from rdt_plan.testing import serve_table

A, B, C = ConsumerId(0, 0), ConsumerId(0, 1), ConsumerId(1, 0)


def ring(consumer: ConsumerId) -> str:
    """The plan digest of a consumer that shares its ring with nobody."""
    return str(consumer)


def epoch_of(
    chunk_groups: Mapping[ConsumerId, Sequence[int]],
    groups: Sequence[int] = (0, 1, 2),
    lookahead: int = 0,
    num_slots: int = 2,
) -> ProducerEpoch:
    tables = {c: serve_table(c, each, num_slots) for c, each in chunk_groups.items()}
    return ProducerEpoch(tables, groups, lookahead)


def pack(epoch: ProducerEpoch, consumer: ConsumerId, seq: int) -> None:
    assert epoch.pack_enqueued(ring(consumer), seq) == []
    assert epoch.packed(ring(consumer), seq) == [Ready(consumer, seq)]


def test_a_whole_epoch() -> None:
    epoch = epoch_of({A: [0, 0, 0, 2], B: [0]})
    assert epoch.publish(0) == [Pack(ring(A), 0), Pack(ring(A), 1), Pack(ring(B), 0)]
    for consumer, seq in ((B, 0), (A, 1), (A, 0)):
        pack(epoch, consumer, seq)
    assert epoch.done(B, 0) == []
    assert epoch.done(A, 1) == []  # seq 2 needs the slot of seq 0
    assert epoch.done(A, 0) == [Pack(ring(A), 2)]
    pack(epoch, A, 2)
    assert epoch.done(A, 2) == [Release(0)]
    assert epoch.publish(1) == [Release(1)]  # nobody reads it
    assert epoch.publish(2) == [Pack(ring(A), 3)]
    pack(epoch, A, 3)
    assert epoch.done(A, 3) == [Release(2), Finished()]
    assert epoch.state is EpochState.FINISHED
    assert epoch.waiting_for() == "nothing"


def test_an_epoch_without_consumers_finishes_with_its_groups() -> None:
    epoch = epoch_of({})
    assert [epoch.publish(group) for group in (0, 1, 2)] == [
        [Release(0)],
        [Release(1)],
        [Release(2), Finished()],
    ]


def test_an_epoch_without_groups_is_finished_from_the_start() -> None:
    assert epoch_of({A: []}, groups=()).state is EpochState.FINISHED


def test_the_lookahead_is_the_credit() -> None:
    epoch = epoch_of({A: [0, 1, 2]}, lookahead=1)
    epoch.publish(0)
    assert epoch.may_publish()
    epoch.publish(1)
    assert not epoch.may_publish()
    with pytest.raises(ProtocolError, match=r"groups \[0, 1\] are unreleased, the lookahead is 1"):
        epoch.publish(2)
    pack(epoch, A, 0)
    assert epoch.done(A, 0) == [Release(0)]
    assert epoch.may_publish()
    assert epoch.publish(2) == [Pack(ring(A), 2)]


def test_groups_may_be_released_out_of_order() -> None:
    epoch = epoch_of({A: [0], B: [1]}, lookahead=1)
    epoch.publish(0)
    epoch.publish(1)
    pack(epoch, B, 0)
    assert epoch.done(B, 0) == [Release(1)]
    assert epoch.may_publish()


@pytest.mark.parametrize("group", [1, 2, 9])
def test_publishing_out_of_order_is_refused(group: int) -> None:
    with pytest.raises(ProtocolError, match=r"expected \(0,\)"):
        epoch_of({A: [0]}).publish(group)


def test_publishing_beyond_the_last_group_is_refused() -> None:
    epoch = epoch_of({A: [0]}, groups=[0], lookahead=3)
    epoch.publish(0)
    assert not epoch.may_publish()
    with pytest.raises(ProtocolError, match="expected no group"):
        epoch.publish(0)


def test_ready_goes_out_only_after_the_pack_completed() -> None:
    epoch = epoch_of({A: [0]})
    epoch.publish(0)
    with pytest.raises(ProtocolError, match=r"consumer r0w0: packed of seq 0 \(group 0, l\.0\.w\)"):
        epoch.packed(ring(A), 0)
    assert epoch.pack_enqueued(ring(A), 0) == []
    assert epoch.packed(ring(A), 0) == [Ready(A, 0)]


def test_a_done_before_its_ready_is_the_peers_fault() -> None:
    epoch = epoch_of({A: [0], B: [1]})
    epoch.publish(0)
    epoch.pack_enqueued(ring(A), 0)
    for consumer, group in ((A, 0), (B, 1)):
        says = (
            rf"consumer {consumer}: DONE of seq 0 \(group {group}, l\.{group}\.w\) before its READY"
        )
        with pytest.raises(PeerProtocolError, match=says):
            epoch.done(consumer, 0)


@pytest.mark.parametrize(("consumer", "seq"), [(A, 1), (A, -1), (C, 0)])
def test_a_done_that_is_not_planned_names_its_consumer(consumer: ConsumerId, seq: int) -> None:
    with pytest.raises(PeerProtocolError, match=f"consumer {consumer}: DONE of seq {seq}"):
        epoch_of({A: [0]}).done(consumer, seq)


def test_a_repeated_done_is_harmless() -> None:
    epoch = epoch_of({A: [0, 1]}, groups=[0, 1], lookahead=1)
    epoch.publish(0)
    pack(epoch, A, 0)
    assert epoch.done(A, 0) == [Release(0)]
    assert epoch.done(A, 0) == []
    epoch.publish(1)
    pack(epoch, A, 1)
    assert epoch.done(A, 1) == [Release(1), Finished()]
    assert epoch.done(A, 0) == []


def test_a_dropped_consumer_holds_nothing_but_its_packs() -> None:
    epoch = epoch_of({A: [0, 0, 0, 1], B: [0]}, lookahead=1)
    epoch.publish(0)
    pack(epoch, B, 0)
    assert epoch.done(B, 0) == []
    pack(epoch, A, 0)  # announced; seq 1 is being packed, seq 2 waits for a slot
    assert epoch.drop(A, "lease ended") == []
    assert epoch.drop(A, "again") == []
    assert epoch.waiting_for() == "group 1 to be published"
    assert epoch.done(A, 0) == []
    assert epoch.pack_enqueued(ring(A), 1) == []
    assert epoch.packed(ring(A), 1) == [Release(0)]  # no READY, and only now may the tensors go
    assert epoch.publish(1) == [Release(1)]
    assert epoch.publish(2) == [Release(2), Finished()]


def test_a_pack_for_a_dropped_consumer_may_be_given_back() -> None:
    epoch = epoch_of({A: [0]}, groups=[0])
    epoch.publish(0)
    assert epoch.drop(A, "lease ended") == []
    assert epoch.pack_failed(ring(A), 0, "dropped") == [Release(0), Finished()]


def test_dropping_everybody_releases_and_finishes() -> None:
    epoch = epoch_of({A: [0, 1], B: [1]}, groups=[0, 1], lookahead=1)
    epoch.publish(0)
    epoch.publish(1)
    pack(epoch, A, 0)
    pack(epoch, A, 1)
    pack(epoch, B, 0)
    assert epoch.drop(A, "gone") == [Release(0)]
    assert epoch.drop(B, "gone") == [Release(1), Finished()]


def test_dropping_before_the_first_publish() -> None:
    epoch = epoch_of({A: [0]}, groups=[0])
    assert epoch.drop(A, "gone") == []
    assert epoch.publish(0) == [Release(0), Finished()]


def test_a_stranger_cannot_be_dropped() -> None:
    with pytest.raises(ProtocolError, match="r1w0"):
        epoch_of({A: [0]}).drop(C, "gone")


def test_an_abort_waits_for_packs() -> None:
    epoch = epoch_of({A: [0, 0], B: [0]})
    epoch.publish(0)
    pack(epoch, A, 0)
    epoch.pack_enqueued(ring(A), 1)
    assert epoch.abort("first") == []
    assert epoch.abort("second") == []
    assert epoch.done(A, 0) == []
    assert not epoch.may_publish()
    with pytest.raises(ProtocolError, match="aborting"):
        epoch.publish(1)
    assert epoch.waiting_for() == (
        "consumer r0w0: the pack of seq 1 (group 0, l.0.w) to complete; "
        "consumer r0w1: the pack of seq 0 (group 0, l.0.w) to be enqueued"
    )
    assert epoch.packed(ring(A), 1) == []
    assert epoch.drop(B, "gone") == []
    assert epoch.pack_failed(ring(B), 0, "aborted") == [Quiesced("first")]
    assert epoch.state is EpochState.QUIESCED
    assert epoch.done(A, 0) == []
    assert epoch.drop(A, "late") == []
    assert epoch.abort("third") == []


def test_an_abort_without_packs_is_quiesced_at_once() -> None:
    assert epoch_of({A: [0]}).abort("enough") == [Quiesced("enough")]


def test_a_failed_pack_aborts_and_says_which() -> None:
    epoch = epoch_of({A: [0, 0]})
    epoch.publish(0)
    assert epoch.pack_failed(ring(A), 0, "no memory") == []
    assert epoch.pack_failed(ring(A), 1, "aborted") == [
        Quiesced("consumer r0w0: pack of seq 0 (group 0, l.0.w) failed: no memory")
    ]


def test_who_holds_it_up_is_named() -> None:
    many = [ConsumerId(replica, 0) for replica in range(6)]
    epoch = epoch_of({A: [0, 0]} | {consumer: [0] for consumer in many[1:]}, groups=[0])
    assert epoch.waiting_for() == "group 0 to be published"
    epoch.publish(0)
    for consumer in many:
        pack(epoch, consumer, 0)
    assert epoch.waiting_for() == (
        "consumer r0w0: DONE of seq 0 (group 0, l.0.w); "
        "consumer r1w0: DONE of seq 0 (group 0, l.0.w); "
        "consumer r2w0: DONE of seq 0 (group 0, l.0.w); "
        "consumer r3w0: DONE of seq 0 (group 0, l.0.w); "
        "and 2 more consumers"
    )
    for consumer in many[1:]:
        epoch.done(consumer, 0)
    assert epoch.waiting_for() == "consumer r0w0: DONE of seq 0 (group 0, l.0.w)"


@pytest.mark.parametrize(
    ("chunk_groups", "groups"),
    [([0, 7], [0, 1]), ([1, 0], [0, 1]), ([0, 1], [1, 0]), ([0], [0, 0])],
)
def test_a_table_outside_the_schedule_is_refused(
    chunk_groups: list[int], groups: list[int]
) -> None:
    with pytest.raises(PlanError):
        epoch_of({A: chunk_groups}, groups)


def test_a_table_that_is_not_numbered_by_seq_is_refused() -> None:
    right = serve_table(A, [0, 0])
    wrong = replace(right, chunks=right.chunks[1:])
    with pytest.raises(PlanError, match="expected seq 0, found 1"):
        ProducerEpoch({A: wrong}, [0], 0)


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ProtocolError, match="lookahead"):
        ProducerEpoch({}, [0], -1)


def test_a_direct_chunk_starts_with_its_group_and_its_tensors_stay_until_done() -> None:
    table = serve_table(A, [0, 0, 1, 1], num_slots=1, direct={1, 2, 3})
    epoch = ProducerEpoch({A: table}, [0, 1], lookahead=1)
    assert epoch.publish(0) == [Pack(ring(A), 1), Pack(ring(A), 0)]  # one needs no slot
    assert epoch.publish(1) == [Pack(ring(A), 2), Pack(ring(A), 3)]  # whoever has the slot
    for seq in (2, 1, 0, 3):
        pack(epoch, A, seq)
    assert epoch.done(A, 3) == []
    assert epoch.done(A, 0) == []
    assert epoch.waiting_for() == "consumer r0w0: DONE of seq 1 (group 0, l.0.w)"
    assert epoch.done(A, 2) == [Release(1)]
    assert epoch.done(A, 1) == [Release(0), Finished()]


def test_a_dropped_reader_of_a_source_holds_it_no_longer() -> None:
    tables = {each: serve_table(each, [0], 1, "one plan", direct={0}) for each in (A, B)}
    epoch = ProducerEpoch(tables, [0], lookahead=0)
    assert epoch.publish(0) == [Pack("one plan", 0)]
    epoch.pack_enqueued("one plan", 0)
    assert epoch.packed("one plan", 0) == [Ready(A, 0), Ready(B, 0)]
    assert epoch.done(A, 0) == []
    assert epoch.drop(B, "gone") == [Release(0), Finished()]


def test_standing_groups_neither_take_nor_need_the_lookahead() -> None:
    table = serve_table(A, [0, 1, 2, 3], num_slots=4)
    epoch = ProducerEpoch({A: table}, [0, 1, 2, 3], lookahead=0, standing={0, 2})
    assert epoch.publish(0) == [Pack(ring(A), 0)]
    assert epoch.publish(1) == [Pack(ring(A), 1)]  # group 0 is not counted
    assert epoch.publish(2) == [Pack(ring(A), 2)]  # and group 2 does not wait for group 1
    assert not epoch.may_publish()
    pack(epoch, A, 1)
    assert epoch.done(A, 1) == [Release(1)]
    assert epoch.may_publish()


@pytest.mark.parametrize(
    ("chunk_groups", "num_incomplete"),
    [
        ({A: [0, 1, 1, 2]}, 2),
        ({A: [0, 1]}, 1),  # it reads the last group elsewhere, or not at all
        ({A: [0], B: [1, 2]}, 2),  # they commit together, so it is enough that one lacks something
        ({A: [0], B: [2], C: [0, 1]}, 1),  # the other replica waits for neither
        ({A: [2], C: []}, 2),
        ({C: []}, 3),
        ({}, 3),  # nobody can have anything of it
    ],
)
def test_how_many_groups_leave_every_replica_incomplete(
    chunk_groups: Mapping[ConsumerId, Sequence[int]], num_incomplete: int
) -> None:
    assert epoch_of(chunk_groups).num_incomplete == num_incomplete


def test_groups_count_in_the_order_in_which_they_are_published() -> None:
    assert epoch_of({A: [2, 0]}, groups=(1, 2, 0)).num_incomplete == 2
    assert epoch_of({A: [1, 2]}, groups=(1, 2, 0)).num_incomplete == 1
