"""What a producer keeps per consumer: its serve ring, its chunk table, and the offer it made."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rdt_plan import (
    ChunkTable,
    ConsumerId,
    Manifest,
    Offer,
    RdtPlanError,
    SlotRegion,
    Subscription,
    check_table,
)
from rdt_transport.errors import RdtTransportError
from rdt_transport.memory import Arena
from rdt_transport.pack import PackList
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import RendezvousClient
from rdt_transport.wire.base import PeerAddress

__all__ = ["ServeRings", "Served"]

_logger = logging.getLogger(__name__)

ADMIT_TIMEOUT_SECONDS = 60.0  # registering one ring and meeting one consumer


@dataclass(slots=True)
class Served:
    """One consumer incarnation, as this producer serves it."""

    consumer: ConsumerId
    incarnation: bytes
    wire_name: str
    table: ChunkTable
    ring: Arena
    packs: dict[int, PackList] = field(default_factory=dict)

    def pack(self, seq: int, sources: Mapping[str, torch.Tensor]) -> None:
        """Fill chunk ``seq``'s serve slot from full, contiguous ``sources``."""
        if seq not in self.packs:
            chunk = self.table.chunks[seq]
            self.packs[seq] = PackList(chunk, self.ring.slot(chunk.serve_slot))
        self.packs[seq].run(sources)


class ServeRings:
    """Serve rings by consumer incarnation. Changed by the serving thread only; `get` is for all.

    Registered memory is never given back before the wire closes: the ring of a consumer that left
    is handed to the next one whose slots fit.
    """

    def __init__(
        self,
        progress: ProgressThread,
        client: RendezvousClient,
        *,
        rank: int,
        incarnation: bytes,
        manifest: Manifest,
        device: torch.device | str,
    ) -> None:
        self._progress = progress
        self._client = client
        self._rank = rank
        self._incarnation = incarnation
        self._manifest = manifest
        self._device = device
        self._served: dict[bytes, Served] = {}
        self._idle: list[Arena] = []

    def admit(self, subscription: Subscription) -> None:
        """Register a ring for a consumer, meet it, and make it an offer.

        One that cannot be served (a table outside the manifest, an unreachable wire) is dropped at
        the rendezvous, which tells it the reason.
        """
        table = next((t for t in subscription.tables if t.owner == self._rank), None)
        incarnation = bytes.fromhex(subscription.incarnation)
        if table is None or incarnation in self._served:
            return
        try:
            check_table(table, self._manifest, self._rank)
            ring = self._ring(table)
            peer = PeerAddress(subscription.wire_name, subscription.metadata)
            self._progress.call(
                lambda wire: wire.connect(peer, ADMIT_TIMEOUT_SECONDS), ADMIT_TIMEOUT_SECONDS
            )
            address = self._progress.call(lambda wire: wire.address(), ADMIT_TIMEOUT_SECONDS)
        except (RdtPlanError, RdtTransportError) as error:
            _logger.warning("producer %d refuses %s: %s", self._rank, subscription.consumer, error)
            reason = f"producer {self._rank} cannot serve it: {error}"
            self._client.drop(subscription.consumer, subscription.incarnation, reason)
            return
        consumer = subscription.consumer
        self._served[incarnation] = Served(consumer, incarnation, peer.name, table, ring)
        self._client.offer(
            Offer(
                consumer=consumer,
                consumer_incarnation=subscription.incarnation,
                rank=self._rank,
                producer_incarnation=self._incarnation.hex(),
                wire_name=address.name,
                metadata=address.metadata,
                slots=tuple(
                    SlotRegion(region.address, region.num_bytes, region.device)
                    for region in map(ring.region, range(table.num_slots))
                ),
            )
        )

    def _ring(self, table: ChunkTable) -> Arena:
        for ring in self._idle:
            if ring.num_slots >= table.num_slots and ring.slot_bytes >= table.slot_bytes:
                self._idle.remove(ring)
                return ring
        ring = Arena(table.num_slots, table.slot_bytes, self._device)
        self._progress.call(lambda wire: wire.register([ring.buffer]), ADMIT_TIMEOUT_SECONDS)
        return ring

    def get(self, incarnation: bytes) -> Served | None:
        """The consumer with that incarnation, if this producer serves it."""
        return self._served.get(incarnation)

    def dismiss(self, incarnation: bytes) -> None:
        """Forget a consumer that left or was dropped; its ring waits for the next one."""
        served = self._served.pop(incarnation, None)
        if served is not None:
            self._idle.append(served.ring)
            name = served.wire_name
            self._progress.call(lambda wire: wire.disconnect(name), ADMIT_TIMEOUT_SECONDS)
