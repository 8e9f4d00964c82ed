"""Sealed subscriptions: opened they are what was sealed, or an error says what is wrong."""

import json
from dataclasses import replace

import pytest

from rdt_plan import RdtPlanError
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous.sealed import SealedSubscription, SealedTable
from rdt_transport.testing.job_records import make_subscription

SUBSCRIPTION = make_subscription(0, 0, owners=(0, 2))
SEALED = SealedSubscription.seal(SUBSCRIPTION)


def through_json(sealed: SealedSubscription) -> SealedSubscription:
    return SealedSubscription.from_json(json.loads(json.dumps(sealed.to_json())))


def with_table(table: SealedTable) -> SealedSubscription:
    return replace(SEALED, tables=(table,))


def test_opened_is_what_was_sealed() -> None:
    assert through_json(SEALED).open() == SUBSCRIPTION
    assert [table.owner for table in SEALED.tables] == [0, 2]


def test_head_is_read_by_the_rendezvous() -> None:
    with pytest.raises(RdtPlanError, match="incarnation"):
        through_json(replace(SEALED, head=replace(SEALED.head, incarnation="x")))


@pytest.mark.parametrize("text", ["", "{}", "\ud800", SEALED.tables[0].text[:-1]])
def test_malformed_table_is_found_when_opened(text: str) -> None:
    sealed = with_table(replace(SEALED.tables[0], text=text))
    assert through_json(sealed) == sealed

    with pytest.raises(RendezvousProtocolError, match="malformed chunk table"):
        sealed.open()


@pytest.mark.parametrize(("owner", "num_slots"), [(1, 2), (0, 3)])
def test_mislabelled_table_is_found_when_opened(owner: int, num_slots: int) -> None:
    with pytest.raises(RendezvousProtocolError, match="is labelled"):
        with_table(SealedTable(owner, num_slots, SEALED.tables[0].text)).open()


def test_table_of_another_consumer_is_found_when_opened() -> None:
    other = SealedSubscription.seal(make_subscription(0, 1, num_workers=2))

    with pytest.raises(RendezvousProtocolError, match="table of consumer r0w1"):
        with_table(other.tables[0]).open()


def test_two_tables_of_one_owner_are_refused() -> None:
    twice = replace(SEALED, tables=(SEALED.tables[0], SEALED.tables[0]))

    with pytest.raises(RendezvousProtocolError, match="one an owner"):
        through_json(twice)


@pytest.mark.parametrize("rows", [None, {}, [[0, 2]], [[0, 0, "{}"]], [[-1, 2, "{}"]], [[0, 2, 1]]])
def test_rows_of_another_shape_are_refused(rows: object) -> None:
    with pytest.raises(RendezvousProtocolError, match=r"rows of \[owner, num_slots, text\]"):
        SealedSubscription.from_json(json.loads(json.dumps({**SEALED.to_json(), "tables": rows})))


def test_table_of_another_plan_is_found_when_opened() -> None:
    other = replace(SEALED, head=replace(SEALED.head, plan_digest="c" * 64))

    with pytest.raises(RendezvousProtocolError, match=r"of plan c+ sent a chunk table"):
        through_json(other).open()
