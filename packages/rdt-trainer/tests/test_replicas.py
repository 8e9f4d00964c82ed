from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_trainer.replicas import Fate, ReplicaEvent, Replicas

ENDED, FAILED, DROPPED = ReplicaEvent.ENDED, ReplicaEvent.FAILED, ReplicaEvent.DROPPED


@pytest.mark.parametrize(
    ("events", "told", "fell"),
    [
        ([ENDED], 0, False),
        ([FAILED], 1, True),
        ([DROPPED], 0, True),
        ([FAILED, DROPPED], 1, True),  # the rendezvous did as it was told
        ([DROPPED, FAILED], 0, True),  # a server notices late what its worker said
        ([DROPPED, ENDED], 0, True),
        ([ENDED, FAILED], 0, False),  # a deadline that comes too late
        ([ENDED, DROPPED], 0, True),
    ],
)
def test_a_replica_is_decided_once_and_told_of_at_most_once(events, told, fell):
    replicas = Replicas([3])
    assert replicas.driven == [3]
    assert sum(replicas.note(3, event) for event in events) == told
    assert replicas.driven == []
    assert replicas.all_fell == fell


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ReplicaEvent)), max_size=20))
def test_one_replica_decides_nothing_for_another(events):
    together = Replicas(range(3))
    alone = [Replicas([each]) for each in range(3)]
    for replica, event in events:
        told = together.note(replica, event)
        assert told == (replica < 3 and alone[replica].note(replica, event))
    assert together.driven == [each for each in range(3) if alone[each].driven]
    assert together.all_fell == all(each.all_fell for each in alone)


def test_whoever_takes_no_part_is_ignored():
    replicas = Replicas([0])
    assert not any(replicas.note(1, event) for event in ReplicaEvent)
    assert replicas.driven == [0]


@pytest.mark.parametrize(("fate", "event"), list(product([Fate.FALLEN], ReplicaEvent)))
def test_nobody_rises_within_a_sync(fate, event):
    replicas = Replicas([0])
    replicas.note(0, DROPPED)
    assert not replicas.note(0, event)
    assert replicas.all_fell
