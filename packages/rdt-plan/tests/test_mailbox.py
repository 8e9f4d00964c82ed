from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan.doorbell import Doorbell, Kind
from rdt_plan.errors import ProtocolError
from rdt_plan.mailbox import DropReason, Mailbox, Verdict

OURS, OTHER = b"o" * 16, b"x" * 16
ME = b"m" * 16


def ready(epoch: int, seq: int = 0, *, session: bytes = OURS, sender: int = 0) -> Doorbell:
    return Doorbell(session, epoch, bytes([sender]) * 16, ME, Kind.READY, seq)


def opened(epoch: int = 1, kept_per_sender: int = 2) -> Mailbox:
    mailbox = Mailbox(kept_per_sender)
    assert mailbox.open(OURS, epoch) == []
    return mailbox


def test_the_open_epoch_is_delivered() -> None:
    assert opened(3).accept(ready(3)) is Verdict.DELIVER


def test_older_epochs_are_dropped_and_counted() -> None:
    mailbox = opened(3)
    assert [mailbox.accept(ready(epoch)) for epoch in (0, 2)] == [Verdict.DROPPED] * 2
    assert mailbox.dropped[DropReason.OLD_EPOCH] == 2


def test_foreign_sessions_are_dropped_and_counted() -> None:
    mailbox = opened(3)
    for epoch in (2, 3, 4):
        assert mailbox.accept(ready(epoch, session=OTHER)) is Verdict.DROPPED
    assert mailbox.dropped[DropReason.FOREIGN_SESSION] == 3
    assert mailbox.open(OURS, 4) == []


def test_the_next_epoch_is_kept_and_replayed_in_order() -> None:
    mailbox = opened()
    early = [ready(2, 1), ready(2, 0), ready(2, 0, sender=1)]
    assert [mailbox.accept(doorbell) for doorbell in early] == [Verdict.KEPT] * 3
    assert mailbox.open(OURS, 2) == early
    assert mailbox.accept(ready(2, 2)) is Verdict.DELIVER


def test_before_the_first_open_everything_is_early() -> None:
    mailbox = Mailbox(2)
    assert mailbox.accept(ready(1, 0)) is Verdict.KEPT
    assert mailbox.accept(ready(5, 0, sender=1)) is Verdict.KEPT
    assert mailbox.accept(ready(1, 0, session=OTHER, sender=2)) is Verdict.KEPT
    assert mailbox.open(OURS, 1) == [ready(1, 0)]
    assert mailbox.dropped[DropReason.FOREIGN_SESSION] == 1
    assert mailbox.open(OURS, 5) == [ready(5, 0, sender=1)]


def test_a_consumer_may_join_late() -> None:
    mailbox = Mailbox(2)
    mailbox.accept(ready(5, 0))
    assert mailbox.open(OURS, 5) == [ready(5, 0)]


def test_an_epoch_that_never_opened_here_is_skipped() -> None:
    mailbox = opened()
    mailbox.accept(ready(2, 0))
    mailbox.accept(ready(2, 1))
    assert mailbox.accept(ready(3, 0)) is Verdict.KEPT
    assert mailbox.dropped[DropReason.OLD_EPOCH] == 2
    assert mailbox.open(OURS, 3) == [ready(3, 0)]


def test_a_late_message_of_an_epoch_its_sender_left_is_dropped() -> None:
    mailbox = opened()
    mailbox.accept(ready(3, 0))
    assert mailbox.accept(ready(2, 0)) is Verdict.DROPPED
    assert mailbox.open(OURS, 3) == [ready(3, 0)]


def test_a_sender_in_a_new_session_has_left_the_old_one() -> None:
    mailbox = Mailbox(1)
    mailbox.accept(ready(4, 0, session=OTHER))
    assert mailbox.accept(ready(1, 0)) is Verdict.KEPT
    assert mailbox.dropped[DropReason.FOREIGN_SESSION] == 1
    assert mailbox.open(OURS, 1) == [ready(1, 0)]


def test_what_is_kept_is_bounded_per_sender() -> None:
    mailbox = opened(kept_per_sender=2)
    verdicts = [mailbox.accept(ready(2, seq)) for seq in range(4)]
    assert verdicts == [Verdict.KEPT] * 2 + [Verdict.DROPPED] * 2
    assert mailbox.accept(ready(2, 0, sender=1)) is Verdict.KEPT
    assert mailbox.dropped[DropReason.OVERFLOW] == 2


def test_a_repeat_takes_no_room() -> None:
    mailbox = opened(kept_per_sender=2)
    for seq in (0, 0, 0, 1):
        assert mailbox.accept(ready(2, seq)) is Verdict.KEPT
    assert mailbox.open(OURS, 2) == [ready(2, 0), ready(2, 1)]


def test_a_new_session_starts_again() -> None:
    mailbox = opened(4)
    mailbox.accept(ready(5))
    assert mailbox.open(OTHER, 1) == []
    assert mailbox.dropped[DropReason.FOREIGN_SESSION] == 1
    assert mailbox.accept(ready(1, session=OTHER)) is Verdict.DELIVER


@pytest.mark.parametrize(("session", "epoch"), [(OURS, 3), (OURS, 2), (OTHER, 0), (b"short", 9)])
def test_a_wrong_open_is_refused_and_changes_nothing(session: bytes, epoch: int) -> None:
    mailbox = opened(3)
    mailbox.accept(ready(4))
    with pytest.raises(ProtocolError):
        mailbox.open(session, epoch)
    assert mailbox.accept(ready(3)) is Verdict.DELIVER
    assert mailbox.open(OURS, 4) == [ready(4)]


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kept_per_sender"):
        Mailbox(0)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_no_message_of_an_epoch_that_opens_is_lost_or_repeated(
    data: st.DataObject, num_senders: int, kept_per_sender: int, num_epochs: int
) -> None:
    """Senders may be one epoch ahead of the receiver, which joins at some epoch."""
    first = data.draw(st.integers(1, num_epochs))
    unsent = [
        deque(
            ready(epoch, seq, sender=sender)
            for epoch in range(1, num_epochs + 1)
            for seq in range(data.draw(st.integers(0, kept_per_sender)))
        )
        for sender in range(num_senders)
    ]
    expected = [[each for each in messages if each.epoch >= first] for messages in unsent]
    mailbox = Mailbox(kept_per_sender)
    delivered: list[Doorbell] = []
    current = first - 1
    while current < num_epochs or any(unsent):
        moves: list[deque[Doorbell] | None] = [
            messages for messages in unsent if messages and messages[0].epoch <= current + 1
        ]
        if current < num_epochs and all(not m or m[0].epoch > current for m in unsent):
            moves.append(None)
        move = data.draw(st.sampled_from(moves))
        if move is None:
            current += 1
            delivered += mailbox.open(OURS, current)
        elif mailbox.accept(move[0]) is Verdict.DELIVER:
            delivered.append(move.popleft())
        else:
            move.popleft()
    for sender, messages in enumerate(expected):
        assert [each for each in delivered if each.sender == bytes([sender]) * 16] == messages
