import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan.errors import WireFormatError
from rdt_plan.identity import ConsumerId
from rdt_plan.records import (
    MAX_NAME_CHARS,
    EpochRecord,
    JobRecord,
    Offer,
    ProducerRecord,
    SlotRegion,
    SourceRegion,
    Subscription,
)
from rdt_plan.table import ChunkTable

Record = ProducerRecord | JobRecord | Subscription | Offer | EpochRecord

HEX = "0123456789abcdef"
IDS = st.text(HEX, min_size=32, max_size=32)
DIGESTS = st.text(HEX, min_size=64, max_size=64)
NAMES = st.text(min_size=1, max_size=9)
COUNTS = st.integers(1, 99)
BLOBS = st.binary(max_size=40)
CONSUMERS = st.builds(ConsumerId, st.integers(0, 9), st.integers(0, 9))


PLACES = st.tuples(st.integers(0, 2**48), st.integers(0, 7))
SOURCES = st.dictionaries(st.integers(0, 99), PLACES, max_size=3).map(
    lambda found: tuple(SourceRegion(param, *found[param]) for param in sorted(found))
)


def producers(rank: int) -> st.SearchStrategy[ProducerRecord]:
    return st.builds(ProducerRecord, st.just(rank), IDS, NAMES, BLOBS, DIGESTS, SOURCES)


@st.composite
def jobs(draw: st.DrawFn) -> JobRecord:
    num_producers = draw(st.integers(1, 3))
    return JobRecord(
        job=draw(NAMES),
        session=draw(IDS),
        wire_version=draw(COUNTS),
        num_producers=num_producers,
        num_slots=draw(COUNTS),
        max_chunk_bytes=draw(COUNTS),
        lookahead=draw(st.integers(0, 3)),
        num_replicas=draw(COUNTS),
        producers=tuple(draw(producers(rank)) for rank in range(num_producers)),
        manifest=draw(BLOBS),
    )


@st.composite
def subscriptions(draw: st.DrawFn) -> Subscription:
    consumer = draw(CONSUMERS)
    return Subscription(
        consumer=consumer,
        num_workers=consumer.worker + draw(COUNTS),
        incarnation=draw(IDS),
        wire_name=draw(NAMES),
        metadata=draw(BLOBS),
        wire_version=draw(COUNTS),
        plan_digest=draw(DIGESTS),
        tables=(),
    )


REGIONS = st.builds(SlotRegion, st.integers(0, 2**48), COUNTS, st.integers(0, 7))
OFFERS = st.builds(
    Offer, CONSUMERS, IDS, COUNTS, IDS, NAMES, BLOBS, st.lists(REGIONS, max_size=3).map(tuple)
)
EPOCHS = st.builds(
    EpochRecord,
    IDS,
    COUNTS,
    st.dictionaries(CONSUMERS, IDS, max_size=3).map(lambda live: tuple(live.items())),
)
RECORDS = st.one_of(producers(3), jobs(), subscriptions(), OFFERS, EPOCHS)


def through_json(record: Record) -> Any:
    return json.loads(json.dumps(record.to_json()))


@given(RECORDS)
def test_a_record_survives_json(record: Record) -> None:
    form = through_json(record)
    assert list(form) == [field.name for field in fields(record) if field.name != "tables"]
    assert type(record).from_json(form) == record


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=70),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from((ProducerRecord, JobRecord, Subscription, Offer, EpochRecord)), ANYTHING)
def test_anything_else_is_refused(kind: type[Record], value: Any) -> None:
    with pytest.raises(WireFormatError):
        kind.from_json(value)


@given(st.data(), RECORDS, ANYTHING)
def test_any_value_in_a_field_is_taken_as_it_is_or_refused(
    data: st.DataObject, record: Record, value: Any
) -> None:
    form = through_json(record)
    form[data.draw(st.sampled_from(list(form)))] = value
    try:
        changed = type(record).from_json(form)
    except WireFormatError:
        return
    assert through_json(changed) == form


@given(st.data(), RECORDS)
def test_every_key_is_needed_and_no_other(data: st.DataObject, record: Record) -> None:
    form = through_json(record)
    with pytest.raises(WireFormatError):
        type(record).from_json(form | {"extra": 1})
    del form[data.draw(st.sampled_from(list(form)))]
    with pytest.raises(WireFormatError):
        type(record).from_json(form)


ID, DIGEST = "0f" * 16, "0f" * 32
WHO = ConsumerId(0, 1)
PRODUCER = ProducerRecord(0, ID, "rdt-0", b"\x00\xff", DIGEST, (SourceRegion(7, 4096, 1),))
JOB = JobRecord("job", ID, 1, 1, 2, 64, 0, 1, (PRODUCER,), b"{}")
TABLE = ChunkTable(WHO, 0, DIGEST, 2, 16, ())
SUBSCRIPTION = Subscription(WHO, 2, ID, "rdt-1", b"", 1, DIGEST, ())
OFFER = Offer(WHO, ID, 0, ID, "rdt-0", b"", (SlotRegion(4096, 16, 0),))
EPOCH = EpochRecord(ID, 1, ((WHO, ID),))


def test_the_form_is_plain() -> None:
    assert through_json(PRODUCER) == {
        "rank": 0,
        "incarnation": ID,
        "wire_name": "rdt-0",
        "metadata": "AP8=",
        "manifest_digest": DIGEST,
        "sources": [[8], [4096], [1]],
    }
    assert through_json(EPOCH) == {"session": ID, "epoch": 1, "live": [[[0, 1], ID]]}
    assert through_json(OFFER)["slots"] == [[4096, 16, 0]]


@pytest.mark.parametrize(
    ("record", "key", "value", "says"),
    [
        (PRODUCER, "rank", -1, "rank: expected an integer"),
        (PRODUCER, "rank", True, "rank: expected an integer"),
        (PRODUCER, "incarnation", ID.upper(), "incarnation: expected 32 lower-case"),
        (PRODUCER, "incarnation", ID[1:], "incarnation: expected 32 lower-case"),
        (PRODUCER, "wire_name", "", "wire_name: expected 1 to 256 characters, found 0"),
        (PRODUCER, "wire_name", "n" * (MAX_NAME_CHARS + 1), "found 257"),
        (PRODUCER, "metadata", "AP8", "metadata: expected base64"),
        (PRODUCER, "metadata", "AP9=", "metadata: expected canonical base64"),
        (PRODUCER, "metadata", "A" * (24 << 20), "metadata: expected at most 16777216 bytes"),
        (PRODUCER, "manifest_digest", ID, "manifest_digest: expected 64"),
        (PRODUCER, "sources", [[7], [1]], r"sources: expected an array of 3"),
        (PRODUCER, "sources", [[7], [1], 0], r"sources: device: expected an array"),
        (PRODUCER, "sources", [[7], [1, 2], [0]], r"sources: expected columns of one length"),
        (PRODUCER, "sources", [[True], [1], [0]], r"sources: param: expected an integer"),
        (PRODUCER, "sources", [[7], [1 << 63], [0]], r"sources: address: expected an integer"),
        (PRODUCER, "sources", [[7], [-1], [0]], r"sources: address: expected an integer"),
        (
            PRODUCER,
            "sources",
            [[2, 0], [1, 9], [0, 0]],
            "sources: expected each parameter once, in",
        ),
        (
            PRODUCER,
            "sources",
            [[1 << 62, 1 << 62, 2], [1, 9, 9], [0, 0, 0]],
            r"sources: param: expected an integer of 0 to 2\*\*63-1, found 9223372036854775809",
        ),
        (JOB, "wire_version", 0, "wire_version: expected at least 1"),
        (JOB, "num_producers", 2, r"producers: expected each rank below 2 once, found \[0\]"),
        (JOB, "num_producers", 2**62, r"producers: expected each rank below 4611\d+ once"),
        (JOB, "producers", [{}], r"producers\[0\]"),
        (SUBSCRIPTION, "num_workers", 1, "expected a worker below 1, found r0w1"),
        (SUBSCRIPTION, "num_workers", 65537, "expected at most 65536, found 65537"),
        (SUBSCRIPTION, "plan_digest", ID, "plan_digest: expected 64"),
        (SUBSCRIPTION, "tables", [], "an object with the keys"),
        (OFFER, "slots", [[1, 0, 0]], r"slots\[0\].num_bytes: expected at least 1"),
        (OFFER, "slots", [[1, 2]], r"slots\[0\].slot: expected an array of 3"),
        (EPOCH, "epoch", 0, "epoch: expected at least 1"),
        (EPOCH, "live", [[[0, 1], ID], [[0, 1], ID]], "live: expected each consumer once"),
    ],
)
def test_what_is_wrong_is_named(record: Record, key: str, value: Any, says: str) -> None:
    form = through_json(record) | {key: value}
    with pytest.raises(WireFormatError, match=says):
        type(record).from_json(form)


def test_tables_are_not_part_of_the_form() -> None:
    with_table = replace(SUBSCRIPTION, tables=(TABLE,))
    assert through_json(with_table) == through_json(SUBSCRIPTION)
