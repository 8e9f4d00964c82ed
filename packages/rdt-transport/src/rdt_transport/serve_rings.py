"""What a producer keeps per consumer: its serve ring, its chunk table, and the offer it made."""

import logging
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch

from rdt_plan import (
    ChunkTable,
    ConsumerId,
    Manifest,
    Offer,
    SlotRegion,
    Subscription,
    check_table,
)
from rdt_transport.errors import SyncAbortedError, WireTimeoutError
from rdt_transport.memory import Arena
from rdt_transport.pack import PackList
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import RendezvousClient
from rdt_transport.wire.base import PeerAddress

__all__ = ["ServeRings", "Served"]

_logger = logging.getLogger(__name__)

ADMIT_TIMEOUT_SECONDS = 60.0  # registering one ring, or meeting one consumer
SLICE_SECONDS = 0.05  # how long the progress thread waits for a newcomer at a time


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
        chunk = self.table.chunks[seq]
        try:
            if seq not in self.packs:
                self.packs[seq] = PackList(chunk, self.ring.slot(chunk.serve_slot))
            self.packs[seq].run(sources)
        except Exception as error:
            raise SyncAbortedError(
                f"packing chunk seq {seq} ({chunk.tensors}) for consumer {self.consumer} failed: "
                f"{error}"
            ) from error


@dataclass(slots=True)
class _Newcomer:
    """One that has a ring and was not met yet; ``seconds``: spent on trying."""

    peer: PeerAddress
    ring: Arena
    seconds: float = 0.0


class ServeRings:
    """Serve rings by consumer incarnation. Changed by the serving thread only; `get` is for all.

    Registered memory is never given back before the wire closes: the ring of a consumer that left
    is handed to the next one whose slots fit. ``gone`` holds the incarnations that are over.
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
        gone: Container[bytes],
    ) -> None:
        self._progress = progress
        self._client = client
        self._rank = rank
        self._incarnation = incarnation
        self._manifest = manifest
        self._device = device
        self._served: dict[bytes, Served] = {}
        self._newcomers: dict[bytes, _Newcomer] = {}
        self._idle: list[Arena] = []
        self._gone = gone

    def admit(self, subscription: Subscription) -> bool:
        """Register a ring for a consumer, meet it, and make it an offer.

        False when its wire has not answered within `SLICE_SECONDS`: call again to go on. One that
        cannot be served (a table outside the manifest, a wire unreachable for
        `ADMIT_TIMEOUT_SECONDS`) is dropped at the rendezvous, which tells it the reason.
        """
        table = next((t for t in subscription.tables if t.owner == self._rank), None)
        incarnation = bytes.fromhex(subscription.incarnation)
        if table is None or incarnation in self._served:
            return True
        if incarnation in self._gone:
            self.dismiss(incarnation)
            return True
        try:
            if incarnation not in self._newcomers:
                check_table(table, self._manifest, self._rank)
                peer = PeerAddress(subscription.wire_name, subscription.metadata)
                self._newcomers[incarnation] = _Newcomer(peer, self._ring(table))
            newcomer = self._newcomers[incarnation]
            if not self._meet(newcomer):
                return False
            del self._newcomers[incarnation]
            ring, consumer, name = newcomer.ring, subscription.consumer, newcomer.peer.name
            self._served[incarnation] = Served(consumer, incarnation, name, table, ring)
            self._client.offer(self._offer(self._served[incarnation]))
        except Exception as error:  # whatever a stranger sent, or made the wire say
            self._refuse(subscription, error)
        return True

    def _meet(self, newcomer: _Newcomer) -> bool:
        """Go on meeting it for one slice; False: not yet."""
        peers, peer, began = self._progress.peers, newcomer.peer, time.monotonic()
        try:
            self._progress.call(
                lambda wire: peers.meet(wire, peer, SLICE_SECONDS), ADMIT_TIMEOUT_SECONDS
            )
        except WireTimeoutError as error:
            newcomer.seconds += time.monotonic() - began
            if newcomer.seconds < ADMIT_TIMEOUT_SECONDS:
                return False
            raise WireTimeoutError(
                f"its wire {peer.name} did not answer for {newcomer.seconds:.0f} s; is that "
                "process alive, polling its wire, and reachable?"
            ) from error
        return True

    def _offer(self, served: Served) -> Offer:
        address = self._progress.call(lambda wire: wire.address(), ADMIT_TIMEOUT_SECONDS)
        return Offer(
            consumer=served.consumer,
            consumer_incarnation=served.incarnation.hex(),
            rank=self._rank,
            producer_incarnation=self._incarnation.hex(),
            wire_name=address.name,
            metadata=address.metadata,
            slots=tuple(
                SlotRegion(region.address, region.num_bytes, region.device)
                for region in map(served.ring.region, range(served.table.num_slots))
            ),
        )

    def _refuse(self, subscription: Subscription, error: Exception) -> None:
        consumer, incarnation = subscription.consumer, subscription.incarnation
        _logger.warning("producer %d refuses %s: %s", self._rank, consumer, error)
        try:
            self.dismiss(bytes.fromhex(incarnation))
        finally:
            reason = f"producer {self._rank} cannot serve it: {type(error).__name__}: {error}"
            self._client.drop(consumer, incarnation, reason)

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
        peers = self._progress.peers
        if (newcomer := self._newcomers.pop(incarnation, None)) is not None:
            self._idle.append(newcomer.ring)
            unmet = newcomer.peer.name
            self._progress.call(lambda wire: peers.give_up(wire, unmet), ADMIT_TIMEOUT_SECONDS)
        if (served := self._served.pop(incarnation, None)) is not None:
            self._idle.append(served.ring)
            name = served.wire_name
            self._progress.call(lambda wire: peers.leave(wire, name), ADMIT_TIMEOUT_SECONDS)
