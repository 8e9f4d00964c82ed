from itertools import product

import pytest

from rdt_trainer.sync_state import Cause, Consequence, Stage, SyncState

STAGES = list(Stage)
UNFINISHED = [stage for stage in STAGES if stage is not Stage.DONE]


def state_in(stage: Stage) -> SyncState:
    state = SyncState()
    for each in STAGES[1 : STAGES.index(stage) + 1]:
        state.advance(each)
    assert state.stage is stage
    return state


def test_a_sync_begins_undecided():
    state = SyncState()
    assert (state.stage, state.failure) == (Stage.BEGIN, None)


@pytest.mark.parametrize(("stage", "cause"), list(product(UNFINISHED, Cause)))
def test_first_failure_decides_in_every_state(stage, cause):
    state, error = state_in(stage), RuntimeError("first")
    consequence = state.fail(cause, error)
    assert consequence is not None
    assert (state.failure.cause, state.failure.stage, state.failure.error) == (cause, stage, error)
    for later in Cause:
        assert state.fail(later, RuntimeError("later")) is None
    state.advance(Stage.DONE)
    assert state.stage is stage
    assert state.failure.error is error


@pytest.mark.parametrize("cause", list(Cause))
def test_a_finished_sync_cannot_fail(cause):
    state = state_in(Stage.DONE)
    assert state.fail(cause, RuntimeError("late")) is None
    assert state.failure is None


@pytest.mark.parametrize(("stage", "cause"), list(product(UNFINISHED, Cause)))
def test_everybody_is_told_unless_the_rendezvous_told_us_or_is_gone(stage, cause):
    consequence = state_in(stage).fail(cause, RuntimeError())
    assert consequence.tell == (cause not in (Cause.PEER, Cause.CONNECTION))


@pytest.mark.parametrize(("stage", "cause"), list(product(UNFINISHED, Cause)))
def test_the_rest_of_the_source_is_discarded_while_others_may_gather_it(stage, cause):
    consequence = state_in(stage).fail(cause, RuntimeError())
    gathers = stage in (Stage.BEGIN, Stage.GATHER)
    pass_is_over = cause in (Cause.SOURCE_RAISED, Cause.INTERRUPT)
    assert consequence.discard == (gathers and not pass_is_over)


@pytest.mark.parametrize("stage", UNFINISHED)
def test_the_producer_is_stopped_once_it_has_begun(stage):
    consequence = state_in(stage).fail(Cause.PRODUCER, RuntimeError())
    assert consequence.stop == (stage is not Stage.BEGIN)


def test_a_whole_row_of_the_table():
    consequence = state_in(Stage.FINISH).fail(Cause.PEER, RuntimeError())
    assert consequence == Consequence(tell=False, stop=True, discard=False)
