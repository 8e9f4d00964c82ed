"""Subscriptions as the rendezvous keeps them: it routes chunk tables, and never reads them.

A worker's tables may hold tens of thousands of slices; decoding them once per worker on the one
thread that also answers heartbeats would stall a large fleet. Producers open what concerns them.
"""

from dataclasses import dataclass, replace
from typing import Any

from rdt_plan import ChunkTable, RdtPlanError, decode_table, encode_table
from rdt_plan.records import Subscription
from rdt_transport.errors import RendezvousProtocolError

__all__ = ["SealedSubscription", "SealedTable"]


@dataclass(frozen=True, slots=True)
class SealedTable:
    """An encoded chunk table (`encode_table`, as text), and what the rendezvous checks of it."""

    owner: int
    num_slots: int
    text: str

    def open(self) -> ChunkTable:
        """The table; raises `RendezvousProtocolError` when it is malformed or mislabelled."""
        try:
            table = decode_table(self.text.encode(errors="replace"))
        except RdtPlanError as error:
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
            tables=tuple(
                SealedTable(table.owner, table.num_slots, encode_table(table).decode())
                for table in subscription.tables
            ),
        )

    def open(self) -> Subscription:
        """Decode the tables; raises `RendezvousProtocolError` when one is not this consumer's."""
        tables = tuple(table.open() for table in self.tables)
        expected = (self.head.consumer, self.head.plan_digest)
        for table in tables:
            if (table.consumer, table.plan_digest) != expected:
                raise RendezvousProtocolError(
                    f"consumer {self.head.consumer} of plan {self.head.plan_digest} sent a chunk "
                    f"table of consumer {table.consumer}, plan {table.plan_digest}"
                )
        return replace(self.head, tables=tables)

    def to_json(self) -> dict[str, Any]:
        """The form of the head, and [owner, num_slots, text] of each table."""
        tables = [[table.owner, table.num_slots, table.text] for table in self.tables]
        return {**self.head.to_json(), "tables": tables}

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


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and [type(item) for item in row] == [int, int, str]
        and row[0] >= 0
        and row[1] > 0
    )
