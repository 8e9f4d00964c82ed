"""Subscriptions and offers as the rendezvous keeps them: it routes them, and never reads them.

A worker's tables may hold tens of thousands of slices; decoding them once per worker on the one
thread that also answers heartbeats would stall a large fleet. Producers open what concerns them,
and equal tables once: equal workers of many replicas send the same text.
"""

import base64
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rdt_plan import ChunkTable, ConsumerId, RdtPlanError, decode_table, encode_table
from rdt_plan.records import Offer, Subscription
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous.packing import pack, unpack

__all__ = ["SealedOffer", "SealedSubscription", "SealedTable"]


class SealedTable(NamedTuple):
    """A chunk table (`encode_table`, packed, in base64), and what the rendezvous checks of it."""

    owner: int
    num_slots: int
    text: str

    @classmethod
    def seal(cls, table: ChunkTable) -> "SealedTable":
        text = base64.b64encode(pack(encode_table(table))).decode("ascii")
        return cls(table.owner, table.num_slots, text)

    def open(self, consumer: ConsumerId) -> ChunkTable:
        """The table; raises `RendezvousProtocolError` when it is malformed or mislabelled."""
        try:
            packed = base64.b64decode(self.text.encode(errors="replace"), validate=True)
            table = decode_table(unpack(packed), consumer)
        except (ValueError, RdtPlanError, RendezvousProtocolError) as error:
            raise RendezvousProtocolError(f"malformed chunk table: {error}") from error
        if (table.owner, table.num_slots) != (self.owner, self.num_slots):
            raise RendezvousProtocolError(
                f"a chunk table for {table.num_slots} slots of producer {table.owner} is labelled "
                f"{self.num_slots} slots of producer {self.owner}"
            )
        return table


@dataclass(frozen=True, slots=True)
class SealedSubscription:
    """A subscription whose tables are sealed; ``head`` is all the rest of it."""

    head: Subscription
    tables: tuple[SealedTable, ...]

    @classmethod
    def seal(cls, subscription: Subscription) -> "SealedSubscription":
        """Encode the tables."""
        return cls(
            head=replace(subscription, tables=()),
            tables=tuple(map(SealedTable.seal, subscription.tables)),
        )

    def open(self, opened: MutableMapping[SealedTable, ChunkTable] | None = None) -> Subscription:
        """Decode the tables; raises `RendezvousProtocolError` when one is not of this plan.

        ``opened``: tables that were opened before, and those that are now. The chunks of equal ones
        are the same objects.
        """
        opened = {} if opened is None else opened
        consumer, tables = self.head.consumer, []
        for sealed in self.tables:
            table = opened.get(sealed)
            if table is None:
                table = opened[sealed] = sealed.open(consumer)
            if table.plan_digest != self.head.plan_digest:
                raise RendezvousProtocolError(
                    f"consumer {consumer} of plan {self.head.plan_digest} sent a chunk table of "
                    f"plan {table.plan_digest}"
                )
            tables.append(replace(table, consumer=consumer))
        return replace(self.head, tables=tuple(tables))

    def to_json(self) -> dict[str, Any]:
        """The form of the head, and [owner, num_slots, text] of each table."""
        return {**self.head.to_json(), "tables": self.rows()}

    def rows(self) -> list[list[Any]]:
        return [list(table) for table in self.tables]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SealedSubscription":
        """Raises `WireFormatError` for the head, `RendezvousProtocolError` for the tables."""
        head = Subscription.from_json({name: value[name] for name in value if name != "tables"})
        rows = value.get("tables")
        if not isinstance(rows, list) or not all(map(_is_row, rows)):
            raise RendezvousProtocolError("tables must be rows of [owner, num_slots, text]")
        tables = tuple(SealedTable(*row) for row in rows)
        if len({table.owner for table in tables}) != len(tables):
            raise RendezvousProtocolError("tables must be one an owner")
        return cls(head, tables)


class SealedOffer(NamedTuple):
    """An offer's JSON as text, and what the rendezvous checks of it."""

    consumer: ConsumerId
    consumer_incarnation: str
    rank: int
    producer_incarnation: str
    text: str

    @classmethod
    def seal(cls, offer: Offer) -> "SealedOffer":
        text = json.dumps(offer.to_json(), separators=(",", ":"))
        return cls(*_labels(offer), text)

    def open(self) -> Offer:
        """The offer; raises `RendezvousProtocolError` when it is malformed or mislabelled."""
        try:
            offer = Offer.from_json(json.loads(self.text))
        except (ValueError, RecursionError, RdtPlanError) as error:
            raise RendezvousProtocolError(f"malformed offer: {error}") from error
        if _labels(offer) != (found := _labels(self)):
            raise RendezvousProtocolError(f"an offer {_labels(offer)} is labelled {found}")
        return offer

    def to_json(self) -> list[Any]:
        """[replica, worker, incarnation, rank, incarnation, text]."""
        return [self.consumer.replica, self.consumer.worker, *_labels(self)[1:], self.text]

    @classmethod
    def from_json(cls, value: Any) -> "SealedOffer":
        """Raises `RendezvousProtocolError` for a row of another shape."""
        if not isinstance(value, list) or list(map(type, value)) != [int, int, str, int, str, str]:
            raise RendezvousProtocolError(
                "an offer must be a row of [replica, worker, incarnation, rank, incarnation, text]"
            )
        replica, worker, *rest = value
        return cls(ConsumerId(replica, worker), *rest)


def _labels(offer: Offer | SealedOffer) -> tuple[ConsumerId, str, int, str]:
    return (
        offer.consumer,
        offer.consumer_incarnation,
        offer.rank,
        offer.producer_incarnation,
    )


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and [type(item) for item in row] == [int, int, str]
        and row[0] >= 0
        and row[1] > 0
    )
