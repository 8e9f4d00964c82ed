"""What the parties of a job tell each other through the rendezvous.

Each record has ``to_json()``, a JSON-ready object with its fields' names as keys, and
``from_json(value)``, which takes what a JSON parser gave and trusts nothing: a missing or foreign
key, a wrong type, sign or length raises `WireFormatError`. Incarnations and sessions are 16 random
bytes as 32 lower-case hexadecimal digits; bytes travel as base64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rdt_plan._base64 import base64_of, bytes_of
from rdt_plan._decoding import consumer_of
from rdt_plan._encoding import consumer_form
from rdt_plan._fields import (
    MAX_NAME_CHARS,
    array,
    digest,
    fields,
    hex32,
    integer,
    positive,
    rows,
    short_name,
)
from rdt_plan._sources_form import SourceRegion, Sources, sources_form, sources_of
from rdt_plan.collector import collector_paused
from rdt_plan.errors import WireFormatError
from rdt_plan.identity import ConsumerId
from rdt_plan.table import ChunkTable
from rdt_plan.wire import MAX_MESSAGE_BYTES

__all__ = [
    "MAX_METADATA_BYTES",
    "MAX_NAME_CHARS",
    "MAX_WORKERS",
    "EpochRecord",
    "JobRecord",
    "Offer",
    "ProducerRecord",
    "SlotRegion",
    "SourceRegion",
    "Sources",
    "Subscription",
]

MAX_METADATA_BYTES = 16 << 20
"""An agent's metadata: it grows with its registered regions, some hundred bytes each."""

MAX_WORKERS = 1 << 16
"""Of one replica."""


@dataclass(frozen=True, slots=True)
class ProducerRecord:
    """One trainer rank and how to reach it; ``sources`` may be read directly, by ``param``."""

    rank: int
    incarnation: str
    wire_name: str
    metadata: bytes
    manifest_digest: str
    sources: Sequence[SourceRegion] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "incarnation": self.incarnation,
            "wire_name": self.wire_name,
            "metadata": base64_of(self.metadata),
            "manifest_digest": self.manifest_digest,
            "sources": sources_form(self.sources),
        }

    @classmethod
    def from_json(cls, value: Any) -> "ProducerRecord":
        form = fields(value, "producer", frozenset(cls.__slots__))
        return cls(
            rank=integer(form["rank"], "rank"),
            incarnation=hex32(form["incarnation"], "incarnation"),
            wire_name=short_name(form["wire_name"], "wire_name"),
            metadata=bytes_of(form["metadata"], "metadata", MAX_METADATA_BYTES),
            manifest_digest=digest(form["manifest_digest"], "manifest_digest"),
            sources=sources_of(form["sources"]),
        )


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job whose producers have all published; ``manifest`` is encoded (`encode_manifest`)."""

    job: str
    session: str
    wire_version: int
    num_producers: int
    num_slots: int
    max_chunk_bytes: int
    lookahead: int
    num_replicas: int
    producers: tuple[ProducerRecord, ...]
    manifest: bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "session": self.session,
            "wire_version": self.wire_version,
            "num_producers": self.num_producers,
            "num_slots": self.num_slots,
            "max_chunk_bytes": self.max_chunk_bytes,
            "lookahead": self.lookahead,
            "num_replicas": self.num_replicas,
            "producers": [producer.to_json() for producer in self.producers],
            "manifest": base64_of(self.manifest),
        }

    @classmethod
    @collector_paused()
    def from_json(cls, value: Any) -> "JobRecord":
        form = fields(value, "job", frozenset(cls.__slots__))
        record = cls(
            job=short_name(form["job"], "job"),
            session=hex32(form["session"], "session"),
            wire_version=positive(form["wire_version"], "wire_version"),
            num_producers=positive(form["num_producers"], "num_producers"),
            num_slots=positive(form["num_slots"], "num_slots"),
            max_chunk_bytes=positive(form["max_chunk_bytes"], "max_chunk_bytes"),
            lookahead=integer(form["lookahead"], "lookahead"),
            num_replicas=positive(form["num_replicas"], "num_replicas"),
            producers=rows(form["producers"], "producers", ProducerRecord.from_json),
            manifest=bytes_of(form["manifest"], "manifest", MAX_MESSAGE_BYTES),
        )
        ranks = sorted(producer.rank for producer in record.producers)
        # Compared by length first: the number is the sender's, and a range of it must not be built.
        if len(ranks) != record.num_producers or ranks != list(range(len(ranks))):
            raise WireFormatError(
                f"producers: expected each rank below {record.num_producers} once, found {ranks}"
            )
        return record


@dataclass(frozen=True, slots=True)
class Subscription:
    """One consumer, how to reach it, and a chunk table for every producer it reads from.

    Its JSON form is all but ``tables``: each of them travels as a message of its own
    (`encode_table`), which the rendezvous passes on unread.
    """

    consumer: ConsumerId
    num_workers: int
    incarnation: str
    wire_name: str
    metadata: bytes
    wire_version: int
    plan_digest: str
    tables: tuple[ChunkTable, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "consumer": consumer_form(self.consumer),
            "num_workers": self.num_workers,
            "incarnation": self.incarnation,
            "wire_name": self.wire_name,
            "metadata": base64_of(self.metadata),
            "wire_version": self.wire_version,
            "plan_digest": self.plan_digest,
        }

    @classmethod
    def from_json(cls, value: Any) -> "Subscription":
        form = fields(value, "subscription", frozenset(cls.__slots__) - {"tables"})
        record = cls(
            consumer=consumer_of(form["consumer"]),
            num_workers=positive(form["num_workers"], "num_workers"),
            incarnation=hex32(form["incarnation"], "incarnation"),
            wire_name=short_name(form["wire_name"], "wire_name"),
            metadata=bytes_of(form["metadata"], "metadata", MAX_METADATA_BYTES),
            wire_version=positive(form["wire_version"], "wire_version"),
            plan_digest=digest(form["plan_digest"], "plan_digest"),
            tables=(),
        )
        if record.num_workers > MAX_WORKERS:
            raise WireFormatError(
                f"num_workers: expected at most {MAX_WORKERS}, found {record.num_workers}"
            )
        if record.consumer.worker >= record.num_workers:
            raise WireFormatError(
                f"consumer: expected a worker below {record.num_workers}, found {record.consumer}"
            )
        return record


class SlotRegion(NamedTuple):
    """Where a serve slot lies in its producer's memory."""

    address: int
    num_bytes: int
    device: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The serve ring of one producer for one consumer incarnation, by serve slot.

    No slots: all that the consumer reads from it is direct.
    """

    consumer: ConsumerId
    consumer_incarnation: str
    rank: int
    producer_incarnation: str
    wire_name: str
    metadata: bytes
    slots: tuple[SlotRegion, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "consumer": consumer_form(self.consumer),
            "consumer_incarnation": self.consumer_incarnation,
            "rank": self.rank,
            "producer_incarnation": self.producer_incarnation,
            "wire_name": self.wire_name,
            "metadata": base64_of(self.metadata),
            "slots": [list(slot) for slot in self.slots],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Offer":
        form = fields(value, "offer", frozenset(cls.__slots__))
        return cls(
            consumer=consumer_of(form["consumer"]),
            consumer_incarnation=hex32(form["consumer_incarnation"], "consumer_incarnation"),
            rank=integer(form["rank"], "rank"),
            producer_incarnation=hex32(form["producer_incarnation"], "producer_incarnation"),
            wire_name=short_name(form["wire_name"], "wire_name"),
            metadata=bytes_of(form["metadata"], "metadata", MAX_METADATA_BYTES),
            slots=rows(form["slots"], "slots", _slot_of),
        )


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch (from 1) of a session, and the incarnation of every consumer that takes part."""

    session: str
    epoch: int
    live: tuple[tuple[ConsumerId, str], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "epoch": self.epoch,
            "live": [[[*consumer_form(consumer)], each] for consumer, each in self.live],
        }

    @classmethod
    def from_json(cls, value: Any) -> "EpochRecord":
        form = fields(value, "epoch", frozenset(cls.__slots__))
        record = cls(
            session=hex32(form["session"], "session"),
            epoch=positive(form["epoch"], "epoch"),
            live=rows(form["live"], "live", _live_of),
        )
        if len({consumer for consumer, _ in record.live}) != len(record.live):
            raise WireFormatError("live: expected each consumer once")
        return record


def _slot_of(row: Any) -> SlotRegion:
    address, num_bytes, device = array(row, "slot", 3)
    return SlotRegion(
        integer(address, "address"), positive(num_bytes, "num_bytes"), integer(device, "device")
    )


def _live_of(row: Any) -> tuple[ConsumerId, str]:
    consumer, incarnation = array(row, "live", 2)
    return consumer_of(consumer), hex32(incarnation, "incarnation")
