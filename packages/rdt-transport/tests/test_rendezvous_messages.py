"""Messages of the rendezvous: everything comes back equal, and nothing else is believed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import WIRE_VERSION, ConsumerId
from rdt_plan.records import EpochRecord, JobRecord
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous import (
    ConsumerDropped,
    ConsumerLeft,
    DroppedReplica,
    EpochFailed,
    EpochOutcome,
    ProducerLost,
    SessionChanged,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.events import Announced, PushedEvent
from rdt_transport.rendezvous.messages import (
    AnnouncementWriter,
    decode_answer,
    decode_event,
    decode_request,
    encode_answer,
    encode_message,
)
from rdt_transport.rendezvous.sealed import SealedOffer, SealedSubscription
from rdt_transport.testing.job_records import (
    incarnation,
    make_offer,
    make_producer,
    make_subscription,
)

CONSUMER = ConsumerId(1, 2)
SUBSCRIPTION = make_subscription(0, 1, num_workers=2, owners=(0, 3))
SEALED = SealedSubscription.seal(SUBSCRIPTION)
PRODUCER = make_producer(0)
OFFER = SealedOffer.seal(make_offer(SUBSCRIPTION, PRODUCER))
EPOCH = EpochRecord(session=incarnation(), epoch=3, live=((CONSUMER, incarnation()),))
JOB = JobRecord(
    job="job",
    session=incarnation(),
    wire_version=WIRE_VERSION,
    num_producers=1,
    num_slots=2,
    max_chunk_bytes=1024,
    lookahead=1,
    num_replicas=1,
    producers=(PRODUCER,),
    manifest=b"\x00\xff",
)
REQUESTS = [
    ask.Publish(PRODUCER, bytes(range(256))),
    ask.GetJob(),
    ask.Subscribe(SEALED, None),
    ask.Subscribe(SEALED, incarnation()),
    ask.ListSubscriptions(),
    ask.GetSubscription(CONSUMER),
    ask.MakeOffers((OFFER, OFFER)),
    ask.GetOffers(CONSUMER, incarnation()),
    ask.Ready(CONSUMER, incarnation()),
    ask.SetReplicas((0, 3)),
    ask.Begin(0, 1),
    ask.GetEpoch(None),
    ask.GetEpoch(7),
    ask.Commit(CONSUMER, incarnation(), 7),
    ask.Fail(7, 'it "broke"\n\ud800'),
    ask.AwaitClose(1, 7),
    ask.Drop(CONSUMER, incarnation(), ""),
    ask.Drop(CONSUMER, incarnation(), "", 7),
    ask.Leave(),
]
EVENTS = [
    Announced(SEALED),
    ConsumerDropped(CONSUMER, incarnation(), "ünïcode"),
    ConsumerLeft(CONSUMER, incarnation()),
    EpochFailed(7, "reason"),
    ProducerLost(3, "reason"),
    SessionChanged(incarnation()),
]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def kind_of(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("request_", REQUESTS, ids=kind_of)
def test_requests_come_back(request_: ask.Request) -> None:
    assert decode_request(through_json(encode_message(request_))) == request_


@pytest.mark.parametrize("event", EVENTS, ids=kind_of)
def test_events_come_back(event: PushedEvent) -> None:
    assert decode_event(through_json(encode_message(event))) == event


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (ask.GetJob(), JOB),
        (ask.Begin(0, 1), EPOCH),
        (ask.GetOffers(CONSUMER, incarnation()), (OFFER, OFFER)),
        (ask.AwaitClose(0, 3), EpochOutcome(3, (0, 2), (DroppedReplica(1, "it left"),))),
        (ask.ListSubscriptions(), (CONSUMER, ConsumerId(0, 0))),
        (ask.GetSubscription(CONSUMER), None),
        (ask.GetSubscription(CONSUMER), SEALED),
        (ask.Leave(), None),
    ],
)
def test_answers_come_back(request_: ask.Request, answer: Any) -> None:
    assert decode_answer(request_, through_json(encode_answer(request_, answer))) == answer


def test_an_announcement_is_written_as_any_event_is() -> None:
    write = AnnouncementWriter()
    other = SealedSubscription.seal(make_subscription(1, 0))
    shown = [SEALED, replace(SEALED, tables=SEALED.tables[:1]), other, replace(SEALED, tables=())]

    for event in map(Announced, shown):
        assert json.loads(write(event)) == through_json(encode_message(event))


def test_lost_connection_is_no_news_of_a_server() -> None:
    with pytest.raises(RendezvousProtocolError, match="unknown event 'ConnectionLost'"):
        decode_event({"kind": "ConnectionLost", "reason": "made up"})


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "Begin",
        {},
        {"kind": "Steal"},
        {"kind": ["Begin"]},
        {"kind": "Begin", "rank": 0},
        {"kind": "Begin", "rank": 0, "epoch": 1, "extra": 2},
        {"kind": "Begin", "rank": "0", "epoch": 1},
        {"kind": "Begin", "rank": True, "epoch": 1},
        {"kind": "Begin", "rank": 1.0, "epoch": 1},
        {"kind": "EpochFailed", "epoch": 1, "reason": "an event is no request"},
        {"kind": "GetSubscription", "consumer": [0]},
        {"kind": "GetSubscription", "consumer": [0, -1]},
        {"kind": "GetSubscription", "consumer": "r0w0"},
        {"kind": "Publish", "record": {}, "manifest": ""},
        {"kind": "Publish", "record": PRODUCER.to_json(), "manifest": "no base64!"},
        {"kind": "Publish", "record": PRODUCER.to_json() | {"rank": -1}, "manifest": ""},
        *(
            {
                "kind": "Subscribe",
                "subscription": SEALED.to_json() | {"tables": tables},
                "session": None,
            }
            for tables in (None, [5], [[0, 2]], [[-1, 2, ""]], [[0, True, ""]], [[0, 2, ""]] * 2)
        ),
        {"kind": "Subscribe", "subscription": SEALED.to_json() | {"x": 1}, "session": None},
    ],
)
def test_what_is_no_request_is_refused(value: Any) -> None:
    with pytest.raises(RendezvousProtocolError):
        decode_request(value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.sampled_from(REQUESTS), st.data())
def test_one_foreign_field_is_refused_or_means_a_request(
    request_: ask.Request, data: st.DataObject
) -> None:
    encoded = encode_message(request_)
    encoded[data.draw(st.sampled_from(sorted(encoded)))] = data.draw(JSON_VALUES)

    try:
        decoded = decode_request(encoded)
    except RendezvousProtocolError:
        return
    assert encode_message(decoded) == encoded
