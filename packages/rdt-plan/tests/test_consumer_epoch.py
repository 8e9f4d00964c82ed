from collections.abc import Sequence
from dataclasses import replace

import pytest

from rdt_plan.chunks import Chunk, ServeChunk
from rdt_plan.consumer_epoch import ConsumerAction, ConsumerEpoch, PostRead, Scatter
from rdt_plan.epoch import EpochState, Finished, Quiesced
from rdt_plan.errors import PeerProtocolError, PlanError, ProtocolError
from rdt_plan.testing import read_chunks, snapshot


def epoch_of(owners: Sequence[int], num_slots: int = 2) -> ConsumerEpoch:
    epoch = ConsumerEpoch(read_chunks(owners, num_slots), num_slots)
    assert epoch.begin() == ([] if owners else [Finished()])
    return epoch


def install(epoch: ConsumerEpoch, index: int) -> list[ConsumerAction]:
    """Take a chunk whose READ is posted to its end; returns the actions of the last step."""
    assert epoch.read_done(index) == [Scatter(index)]
    assert epoch.scatter_enqueued(index) == []
    return epoch.scatter_completed(index)


def test_a_whole_epoch() -> None:
    epoch = epoch_of([0, 1, 0])
    assert epoch.ready(0, 0) == [PostRead(0)]
    assert epoch.ready(1, 0) == [PostRead(1)]
    assert epoch.ready(0, 1) == []
    assert install(epoch, 0) == [PostRead(2)]
    assert install(epoch, 1) == []
    assert install(epoch, 2) == [Finished()]
    assert epoch.state is EpochState.FINISHED
    assert epoch.waiting_for() == "nothing"


def test_an_empty_plan_is_finished_when_it_begins() -> None:
    assert epoch_of([]).state is EpochState.FINISHED


def test_reads_are_posted_in_plan_order() -> None:
    epoch = epoch_of([0, 1, 2], num_slots=3)
    assert epoch.ready(2, 0) == []
    assert epoch.ready(1, 0) == []
    assert epoch.ready(0, 0) == [PostRead(0), PostRead(1), PostRead(2)]


def test_a_slot_is_reused_only_when_its_scatter_was_enqueued_and_completed() -> None:
    epoch = epoch_of([0, 1], num_slots=1)
    epoch.ready(1, 0)
    epoch.ready(0, 0)
    assert epoch.waiting_for() == (
        "chunk 1 (seq 0, l.1.a and 1 more) of producer 1: receive slot 0, still used by "
        "chunk 0 (seq 0, l.0.a and 1 more) of producer 0: READ not completed"
    )
    assert epoch.read_done(0) == [Scatter(0)]
    with pytest.raises(ProtocolError):
        epoch.scatter_completed(0)  # the slot's event speaks of an earlier scatter
    assert epoch.scatter_enqueued(0) == []
    assert epoch.waiting_for().endswith("scatter not completed")
    assert epoch.scatter_completed(0) == [PostRead(1)]


def test_the_completion_of_an_earlier_use_does_not_free_a_slot() -> None:
    epoch = epoch_of([0, 1, 2], num_slots=1)
    for owner in range(3):
        epoch.ready(owner, 0)
    assert install(epoch, 0) == [PostRead(1)]
    epoch.read_done(1)
    epoch.scatter_enqueued(1)
    with pytest.raises(ProtocolError, match="generation"):
        epoch.scatter_completed(0)
    assert epoch.scatter_completed(1) == [PostRead(2)]


def test_a_repeated_ready_is_harmless_in_every_state() -> None:
    epoch = epoch_of([0, 1])
    assert epoch.ready(1, 0) == []
    assert epoch.ready(1, 0) == []
    assert epoch.ready(0, 0) == [PostRead(0), PostRead(1)]
    for step in (
        lambda: epoch.read_done(0),
        lambda: epoch.scatter_enqueued(0),
        lambda: epoch.scatter_completed(0),
        lambda: install(epoch, 1),
    ):
        assert epoch.ready(0, 0) == []
        step()
    assert epoch.state is EpochState.FINISHED
    assert epoch.ready(0, 0) == []


@pytest.mark.parametrize(("owner", "seq"), [(0, 2), (0, -1), (3, 0)])
def test_a_ready_that_is_not_planned_names_its_producer(owner: int, seq: int) -> None:
    epoch = epoch_of([0, 0])
    with pytest.raises(PeerProtocolError, match=f"producer {owner}: READY of seq {seq}"):
        epoch.ready(owner, seq)


def test_a_producer_that_overwrites_an_unread_serve_slot_is_caught() -> None:
    epoch = epoch_of([1, 0, 0, 0])
    epoch.ready(0, 0)
    with pytest.raises(PeerProtocolError, match=r"producer 0: READY of seq 2 in serve slot 0"):
        epoch.ready(0, 2)
    epoch.ready(1, 0)  # now seq 0 is posted, and its DONE may be at the producer already
    assert epoch.ready(0, 2) == []


def test_the_next_read_is_not_a_read_either() -> None:
    epoch = epoch_of([0, 0, 0])
    with pytest.raises(PeerProtocolError, match=r"seq 2 in serve slot 0, whose chunk 0 \(seq 0, l"):
        epoch.ready(0, 2)


def test_a_ready_before_the_begin_is_our_misuse() -> None:
    epoch = ConsumerEpoch(read_chunks([1], 2), 2)
    with pytest.raises(ProtocolError, match="READY of producer 1"):
        epoch.ready(1, 0)
    assert epoch.begin() == []
    assert epoch.ready(1, 0) == [PostRead(0)]


def test_what_is_missing_is_named() -> None:
    first = "chunk 0 (seq 0, l.0.a and 1 more) of producer 1"
    second = "chunk 1 (seq 1, l.1.a and 1 more) of producer 1"
    epoch = ConsumerEpoch(read_chunks([1, 1], 2), 2)
    assert epoch.waiting_for() == "begin"
    epoch.begin()
    assert epoch.waiting_for() == f"{first}: READY not received"
    epoch.ready(1, 0)
    assert epoch.waiting_for() == f"{second}: READY not received"
    epoch.ready(1, 1)
    assert epoch.waiting_for() == f"{first}: READ not completed"
    epoch.read_done(0)
    assert epoch.waiting_for() == f"{first}: scatter not enqueued"
    epoch.abort("enough")
    epoch.scatter_enqueued(0)
    assert epoch.waiting_for() == f"{first}: scatter not completed"
    epoch.scatter_completed(0)
    assert epoch.waiting_for() == f"{second}: READ not completed"
    epoch.read_done(1)
    assert epoch.waiting_for() == "nothing"


def test_an_abort_waits_for_reads_and_scatters() -> None:
    epoch = epoch_of([0, 1, 2, 3], num_slots=3)
    for owner in range(4):
        epoch.ready(owner, 0)
    epoch.read_done(0)
    epoch.read_done(1)
    epoch.scatter_enqueued(0)
    assert epoch.abort("first") == []
    assert epoch.abort("second") == []
    assert epoch.ready(3, 0) == []
    assert epoch.read_done(2) == []  # no scatter any more
    assert epoch.scatter_enqueued(1) == []
    assert epoch.scatter_completed(1) == []
    assert epoch.state is EpochState.ABORTING
    assert epoch.scatter_completed(0) == [Quiesced("first")]
    assert epoch.state is EpochState.QUIESCED
    assert epoch.abort("third") == []


def test_an_abort_with_nothing_in_flight_is_quiesced_at_once() -> None:
    epoch = epoch_of([0])
    assert epoch.abort("enough") == [Quiesced("enough")]


def test_an_epoch_may_be_aborted_before_it_begins() -> None:
    epoch = ConsumerEpoch(read_chunks([0], 2), 2)
    assert epoch.abort("enough") == [Quiesced("enough")]
    with pytest.raises(ProtocolError):
        epoch.begin()


def test_an_abort_after_the_end_is_ignored() -> None:
    epoch = epoch_of([])
    assert epoch.abort("late") == []
    assert epoch.state is EpochState.FINISHED


def test_a_failed_read_aborts_and_says_which() -> None:
    epoch = epoch_of([1, 1])
    epoch.ready(1, 0)
    epoch.ready(1, 1)
    assert epoch.read_failed(0, "peer gone") == []
    assert epoch.read_failed(1, "peer gone too") == [
        Quiesced("chunk 0 (seq 0, l.0.a and 1 more) of producer 1: READ failed: peer gone")
    ]


def test_a_failed_scatter_aborts_and_says_which() -> None:
    epoch = epoch_of([1])
    epoch.ready(1, 0)
    epoch.read_done(0)
    assert epoch.scatter_failed(0, "no such module") == [
        Quiesced("chunk 0 (seq 0, l.0.a and 1 more) of producer 1: scatter failed: no such module")
    ]


def test_a_scatter_that_failed_after_it_was_enqueued_cannot_complete() -> None:
    epoch = epoch_of([1, 1])
    epoch.ready(1, 0)
    epoch.ready(1, 1)
    epoch.read_done(0)
    epoch.scatter_enqueued(0)
    assert epoch.scatter_failed(0, "device lost") == []
    before = snapshot(epoch)
    with pytest.raises(ProtocolError, match=r"slot 0 .* is free: it cannot be completed now"):
        epoch.scatter_completed(0)
    assert snapshot(epoch) == before
    [quiesced] = epoch.read_done(1)
    assert isinstance(quiesced, Quiesced)


def test_an_installer_may_give_a_chunk_back_after_an_abort() -> None:
    epoch = epoch_of([1])
    epoch.ready(1, 0)
    epoch.read_done(0)
    assert epoch.abort("first") == []
    assert epoch.scatter_failed(0, "aborted") == [Quiesced("first")]


@pytest.mark.parametrize(
    "wrong",
    [
        read_chunks([0, 0], 2)[1:],
        read_chunks([0], 2) * 2,
        [Chunk(0, 0, ServeChunk(0, 0, 0, 16, (), ()), 2, (), (), ())],
        [read_chunks([0, 1], 2)[0], Chunk(1, 0, read_chunks([0], 2)[0].serve, 1, (), (), ())],
    ],
)
def test_chunks_that_contradict_each_other_are_refused(wrong: list[Chunk]) -> None:
    with pytest.raises(PlanError):
        ConsumerEpoch(wrong, 2)


def test_scatters_are_handed_out_in_plan_order_whatever_lands_first() -> None:
    epoch = epoch_of([0, 1, 2], num_slots=3)
    for owner in (0, 1, 2):
        epoch.ready(owner, 0)
    assert epoch.read_done(2) == []
    assert epoch.read_done(1) == []
    assert epoch.read_done(0) == [Scatter(0), Scatter(1), Scatter(2)]


def test_a_chunk_that_landed_before_its_turn_does_not_hold_an_abort_up() -> None:
    epoch = epoch_of([0, 1], num_slots=2)
    for owner in (0, 1):
        epoch.ready(owner, 0)
    epoch.read_done(1)
    assert epoch.abort("enough") == []
    assert epoch.read_done(0) == [Quiesced("enough")]
    with pytest.raises(ProtocolError):
        epoch.scatter_enqueued(1)


def direct_epoch(owners: Sequence[int], direct: set[int], num_slots: int = 1) -> ConsumerEpoch:
    epoch = ConsumerEpoch(read_chunks(owners, num_slots, direct), num_slots)
    epoch.begin()
    return epoch


def test_a_direct_chunk_waits_for_its_ready_alone_and_ends_with_its_read() -> None:
    epoch = direct_epoch([0, 0, 1, 1], direct={1, 3})
    assert epoch.ready(1, 1) == [PostRead(3)]  # others before it are awaited
    assert epoch.ready(0, 0) == [PostRead(0)]  # and take the only slot
    assert epoch.ready(1, 0) == []
    assert epoch.ready(0, 1) == [PostRead(1)]
    assert epoch.read_done(3) == []
    assert epoch.ready(1, 1) == []  # a repeat
    assert install(epoch, 0) == [PostRead(2)]
    assert install(epoch, 2) == []
    assert epoch.waiting_for().endswith("producer 0: READ not completed")
    assert epoch.read_done(1) == [Finished()]


def test_a_direct_chunk_is_waited_for_by_name() -> None:
    epoch = direct_epoch([0, 1], direct={1})
    epoch.ready(0, 0)
    assert epoch.waiting_for() == (
        "chunk 1 (seq 0, l.1.a and 1 more) of producer 1: READY not received"
    )


def test_an_abort_waits_for_direct_reads_and_counts_none() -> None:
    epoch = direct_epoch([0, 1], direct={0, 1})
    epoch.ready(0, 0)
    epoch.ready(1, 0)
    assert epoch.abort("enough") == []
    assert epoch.read_done(1) == []
    assert epoch.read_done(0) == [Quiesced("enough")]


@pytest.mark.parametrize("slot", ["receive_slot", "serve_slot"])
def test_a_chunk_is_direct_at_both_ends_or_at_none(slot: str) -> None:
    [chunk] = read_chunks([0], 1, {0})
    if slot == "receive_slot":
        chunk = replace(chunk, receive_slot=0)
    else:
        chunk = replace(chunk, serve=replace(chunk.serve, serve_slot=0, offsets=(0, 16, 32)))
    with pytest.raises(PlanError, match="chunk 0: expected two slots or none"):
        ConsumerEpoch([chunk], 1)
