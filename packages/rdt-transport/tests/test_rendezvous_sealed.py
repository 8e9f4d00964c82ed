"""Sealed subscriptions: opened they are what was sealed, or an error says what is wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rdt_plan import ChunkTable, ConsumerId, RdtPlanError
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous.sealed import (
    SealedOffer,
    SealedSubscription,
    SealedTable,
    offers_form,
    offers_of,
)
from rdt_transport.testing.job_records import (
    incarnation,
    make_offer,
    make_producer,
    make_subscription,
)

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
    sealed = with_table(SEALED.tables[0]._replace(text=text))
    assert through_json(sealed) == sealed

    with pytest.raises(RendezvousProtocolError, match="malformed chunk table"):
        sealed.open()


@pytest.mark.parametrize(("owner", "num_slots"), [(1, 2), (0, 3)])
def test_mislabelled_table_is_found_when_opened(owner: int, num_slots: int) -> None:
    with pytest.raises(RendezvousProtocolError, match="is labelled"):
        with_table(SealedTable(owner, num_slots, SEALED.tables[0].text)).open()


def test_equal_tables_are_opened_once() -> None:
    other = SealedSubscription.seal(make_subscription(0, 1, num_workers=2, owners=(0,)))
    opened: dict[SealedTable, ChunkTable] = {}
    (first, _), (second,) = SEALED.open(opened).tables, other.open(opened).tables

    assert [first.consumer, second.consumer] == [ConsumerId(0, 0), ConsumerId(0, 1)]
    assert first.chunks is second.chunks
    assert set(opened) == {*SEALED.tables}


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


OFFER = make_offer(SUBSCRIPTION, make_producer(2))
SEALED_OFFER = SealedOffer.seal(OFFER)
ID = incarnation()


def test_an_opened_offer_is_what_was_sealed() -> None:
    (again,) = offers_of(json.loads(json.dumps(offers_form([SEALED_OFFER]))))
    assert again == SEALED_OFFER
    assert again.open() == OFFER


def test_offers_of_one_ring_share_its_text() -> None:
    other = SealedOffer.seal(replace(OFFER, consumer=ConsumerId(3, 0), consumer_incarnation=ID))
    ring = SealedOffer.seal(replace(OFFER, wire_name="another"))
    form = json.loads(json.dumps(offers_form([SEALED_OFFER, ring, other])))

    assert form[0] == [SEALED_OFFER.text, ring.text]
    first, second, third = offers_of(form)
    assert (first, second, third) == (SEALED_OFFER, ring, other)
    assert first.text is third.text
    assert third.open().consumer == ConsumerId(3, 0)


@pytest.mark.parametrize("text", ["", "{}", "[" * 10**6, SEALED_OFFER.text[:-1]])
def test_malformed_offer_is_found_when_opened(text: str) -> None:
    with pytest.raises(RendezvousProtocolError, match="malformed offer"):
        SEALED_OFFER._replace(text=text).open()


@pytest.mark.parametrize(
    "label",
    [
        {"consumer": ConsumerId(-1, 1)},
        {"consumer_incarnation": "0" * 31},
        {"rank": -1},
        {"producer_incarnation": "x" * 32},
    ],
)
def test_a_bad_label_is_found_when_an_offer_is_opened(label: dict[str, Any]) -> None:
    with pytest.raises(RendezvousProtocolError, match="malformed offer"):
        SEALED_OFFER._replace(**label).open()


@pytest.mark.parametrize(
    "row",
    [
        None,
        {},
        [],
        [0, 0, "a", 0, "b"],
        [0, 0, "a", "0", "b", 0],
        [0, 0, "a", 0, "b", 1],
        [0, 0, "a", 0, "b", -1],
        [0, 0, "a", 0, "b", True],
    ],
)
def test_an_offer_of_another_shape_is_refused(row: object) -> None:
    with pytest.raises(RendezvousProtocolError, match="must be a row of"):
        offers_of([["text"], [row]])


@pytest.mark.parametrize("form", [None, [], [[]], [[1], []], [{}, []], [[], {}], [[], [], []]])
def test_offers_of_another_form_are_refused(form: object) -> None:
    with pytest.raises(RendezvousProtocolError, match="a list of texts and one of rows"):
        offers_of(form)
