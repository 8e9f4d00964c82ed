"""Subscriptions and offers as the rendezvous keeps them: it routes them, and never reads them.

A worker's tables may hold tens of thousands of slices; decoding them once per worker on the one
thread that also answers heartbeats would stall a large fleet. Producers open what concerns them,
and equal tables once: equal workers of many replicas send the same text.
"""

import base64
import json
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from rdt_plan import ChunkTable, ConsumerId, RdtPlanError, decode_table, encode_table
from rdt_plan.records import Offer, Subscription
from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous.packing import pack, unpack

__all__ = ["SealedOffer", "SealedSubscription", "SealedTable", "offers_form", "offers_of"]


class SealedTable(NamedTuple):
    """A chunk table (`encode_table`, packed, in base64), and what the rendezvous checks of it."""

    owner: int
    num_slots: int
    text: str

    @classmethod
    def seal(cls, table: ChunkTable, numbers: Mapping[str, int] | None = None) -> "SealedTable":
        """``numbers``: see `encode_table`."""
        text = base64.b64encode(pack(encode_table(table, numbers))).decode("ascii")
        return cls(table.owner, table.num_slots, text)

    def open(self, consumer: ConsumerId, names: Sequence[str] = ()) -> ChunkTable:
        """The table; raises `RendezvousProtocolError` when it is malformed or mislabelled.

        ``names``: see `decode_table`.
        """
        try:
            packed = base64.b64decode(self.text.encode(errors="replace"), validate=True)
            table = decode_table(unpack(packed), consumer, names)
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
    def seal(
        cls, subscription: Subscription, numbers: Mapping[str, int] | None = None
    ) -> "SealedSubscription":
        """Encode the tables; ``numbers``: see `encode_table`."""
        return cls(
            head=replace(subscription, tables=()),
            tables=tuple([SealedTable.seal(table, numbers) for table in subscription.tables]),
        )

    def open(
        self,
        opened: MutableMapping[SealedTable, ChunkTable] | None = None,
        names: Sequence[str] = (),
    ) -> Subscription:
        """Decode the tables; raises `RendezvousProtocolError` when one is not of this plan.

        ``opened``: tables that were opened before, and those that are now. The chunks of equal ones
        are the same objects. ``names``: see `decode_table`.
        """
        opened = {} if opened is None else opened
        consumer, tables = self.head.consumer, []
        for sealed in self.tables:
            table = opened.get(sealed)
            if table is None:
                table = opened[sealed] = sealed.open(consumer, names)
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
    """An offer's labels, which the rendezvous reads, and the JSON of all the rest as text.

    That is where a producer's ring is, and the same for all who read it: many offers, one text.
    """

    consumer: ConsumerId
    consumer_incarnation: str
    rank: int
    producer_incarnation: str
    text: str

    @classmethod
    def seal(cls, offer: Offer) -> "SealedOffer":
        form = offer.to_json()
        text = json.dumps({name: form[name] for name in _RING}, separators=(",", ":"))
        return cls(
            offer.consumer, offer.consumer_incarnation, offer.rank, offer.producer_incarnation, text
        )

    def open(self) -> Offer:
        """The offer; raises `RendezvousProtocolError` when it is malformed."""
        consumer, *labels, text = self
        try:
            ring = json.loads(text)
            if not isinstance(ring, dict) or sorted(ring) != _RING:
                raise RendezvousProtocolError(f"malformed offer: expected {_RING}")
            said = dict(zip(_LABELS, [[consumer.replica, consumer.worker], *labels], strict=True))
            return Offer.from_json(ring | said)
        except (ValueError, RecursionError, RdtPlanError) as error:
            raise RendezvousProtocolError(f"malformed offer: {error}") from error


_LABELS = SealedOffer._fields[:-1]
_RING = sorted({field.name for field in fields(Offer)} - set(_LABELS))  # one spelling everywhere


def offers_form(offers: Iterable[SealedOffer]) -> list[Any]:
    """All texts, each once, and rows [replica, worker, incarnation, rank, incarnation, text]."""
    texts: dict[str, int] = {}
    rows = [
        [c.replica, c.worker, whose, rank, incarnation, texts.setdefault(text, len(texts))]
        for c, whose, rank, incarnation, text in offers
    ]
    return [list(texts), rows]


def offers_of(value: Any) -> tuple[SealedOffer, ...]:
    """Raises `RendezvousProtocolError` for another form."""
    match value:
        case [list(texts), list(rows)] if all(type(text) is str for text in texts):
            return tuple([_offer_of(row, texts) for row in rows])
    raise RendezvousProtocolError("offers must be a list of texts and one of rows")


def _offer_of(row: Any, texts: Sequence[str]) -> SealedOffer:
    if (
        not isinstance(row, list)
        or list(map(type, row)) != [int, int, str, int, str, int]
        or not 0 <= row[-1] < len(texts)
    ):
        raise RendezvousProtocolError(
            "an offer must be a row of [replica, worker, incarnation, rank, incarnation, text]"
        )
    replica, worker, whose, rank, incarnation, number = row
    return SealedOffer(ConsumerId(replica, worker), whose, rank, incarnation, texts[number])


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and [type(item) for item in row] == [int, int, str]
        and row[0] >= 0
        and row[1] > 0
    )
