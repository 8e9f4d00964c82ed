import pytest

from rdt_plan import ConsumerId, EpochRecord
from rdt_trainer.numbering import EpochNumbering
from rdt_transport.errors import EpochFailedError, RendezvousTimeoutError


def record(epoch: int) -> EpochRecord:
    return EpochRecord("ab" * 16, epoch, ((ConsumerId(0, 0), "cd" * 16),))


class Script:
    """Answers begins with what was laid down for each epoch, in order."""

    def __init__(self, **answers: list) -> None:
        self.answers = {int(key[1:]): list(value) for key, value in answers.items()}
        self.asked: list[int] = []

    def __call__(self, epoch: int) -> EpochRecord:
        self.asked.append(epoch)
        answer = self.answers[epoch].pop(0) if self.answers.get(epoch) else record(epoch)
        if isinstance(answer, Exception):
            raise answer
        return answer


FAILED = EpochFailedError("epoch failed")
TIMEOUT = RendezvousTimeoutError("nobody is ready")


def test_epochs_count_from_one():
    numbering, begin = EpochNumbering(), Script()
    assert [numbering.begin(begin).epoch for _ in range(3)] == [1, 2, 3]


def test_an_epoch_that_failed_before_we_came_is_left_behind():
    numbering, begin = EpochNumbering(), Script(e1=[FAILED])
    with pytest.raises(EpochFailedError):
        numbering.begin(begin)
    assert numbering.begin(begin).epoch == 2
    assert begin.asked == [1, 2]


def test_an_epoch_that_did_not_open_is_asked_for_again():
    numbering, begin = EpochNumbering(), Script(e1=[TIMEOUT, TIMEOUT])
    for _ in range(2):
        with pytest.raises(RendezvousTimeoutError):
            numbering.begin(begin)
    assert numbering.begin(begin).epoch == 1


def test_an_epoch_that_others_opened_and_failed_without_us_is_not_reported_twice():
    numbering, begin = EpochNumbering(), Script(e1=[TIMEOUT, FAILED])
    with pytest.raises(RendezvousTimeoutError):
        numbering.begin(begin)
    assert numbering.begin(begin).epoch == 2
    assert begin.asked == [1, 1, 2]


def test_doubt_moves_on_with_the_epoch():
    numbering, begin = EpochNumbering(), Script(e1=[TIMEOUT, FAILED], e2=[TIMEOUT, FAILED])
    for _ in range(2):
        with pytest.raises(RendezvousTimeoutError):
            numbering.begin(begin)
    assert numbering.begin(begin).epoch == 3
    assert begin.asked == [1, 1, 2, 2, 3]
