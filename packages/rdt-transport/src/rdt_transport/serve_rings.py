"""Whom a producer serves, from which ring, and how a consumer is admitted to one."""

import logging
import time
from collections.abc import Collection, Container
from dataclasses import dataclass

import torch

from rdt_plan import (
    ChunkTable,
    ConsumerId,
    EpochRecord,
    Manifest,
    Offer,
    PlanError,
    SlotRegion,
    Subscription,
    check_sharing,
    check_table,
)
from rdt_transport.errors import WireTimeoutError
from rdt_transport.memory import Arena
from rdt_transport.progress import ProgressThread
from rdt_transport.rendezvous import RendezvousClient
from rdt_transport.serve_ring import Served, ServeRing
from rdt_transport.wire.base import PeerAddress

__all__ = ["ServeRings"]

_logger = logging.getLogger(__name__)

ADMIT_TIMEOUT_SECONDS = 60.0  # registering one ring, or meeting one consumer
SLICE_SECONDS = 0.05  # how long the progress thread waits for a newcomer at a time


@dataclass(slots=True)
class _Newcomer:
    """One that has a ring and was not met yet; ``seconds``: spent on trying."""

    peer: PeerAddress
    ring: ServeRing
    seconds: float = 0.0


class ServeRings:
    """Serve rings by plan digest, and their readers by incarnation.

    Consumers of one plan read one ring; one whose chunks are all direct has no slots. Registered
    memory is never given back before the wire closes: the slots of a ring whose last reader left
    are handed to the next ring that they fit.
    Changed by the serving thread only; `get` is for all.

    Args:
        num_slots: the job's; a table for another number is refused.
        gone: the incarnations that are over.
        sources: the names that direct chunks may read.
    """

    def __init__(
        self,
        progress: ProgressThread,
        client: RendezvousClient,
        *,
        rank: int,
        incarnation: bytes,
        manifest: Manifest,
        num_slots: int,
        device: torch.device | str,
        gone: Container[bytes],
        sources: Collection[str] = frozenset(),
    ) -> None:
        self._progress = progress
        self._client = client
        self._rank = rank
        self._incarnation = incarnation
        self._manifest = manifest
        self._num_slots = num_slots
        self._device = device
        self._served: dict[bytes, Served] = {}
        self._newcomers: dict[bytes, _Newcomer] = {}
        self._rings: dict[str, ServeRing] = {}
        self._idle: list[Arena] = []
        self._unoffered: list[bytes] = []
        self._gone = gone
        self._sources = sources

    def admit(self, subscription: Subscription) -> bool:
        """Find or register a ring for a consumer, and meet it; `make_offers` then tells it.

        False when its wire has not answered within `SLICE_SECONDS`: call again to go on. One that
        cannot be served (a table outside the manifest, or unlike that of another consumer with
        its plan digest; a wire unreachable for `ADMIT_TIMEOUT_SECONDS`) is dropped at the
        rendezvous, which tells it the reason.
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
                self._check(subscription, table)
                peer = PeerAddress(subscription.wire_name, subscription.metadata)
                ring = self._ring(table)
                ring.readers[incarnation] = subscription.consumer
                self._newcomers[incarnation] = _Newcomer(peer, ring)
            newcomer = self._newcomers[incarnation]
            if not self._meet(newcomer):
                return False
            del self._newcomers[incarnation]
            served = Served(subscription.consumer, incarnation, newcomer.peer.name, newcomer.ring)
            self._served[incarnation] = served
            self._unoffered.append(incarnation)
        except Exception as error:  # whatever a stranger sent, or made the wire say
            self._refuse(subscription.consumer, incarnation, error)
        return True

    def make_offers(self) -> None:
        """Offer their rings to all that were admitted since the last call, in one message."""
        unoffered, self._unoffered = self._unoffered, []
        served = [each for who in unoffered if (each := self._served.get(who)) is not None]
        if served:
            try:
                address = self._progress.call(lambda wire: wire.address(), ADMIT_TIMEOUT_SECONDS)
                self._client.offer([self._offer(each, address) for each in served])
            except Exception as error:
                for each in served:
                    self._refuse(each.consumer, each.incarnation, error)

    def _check(self, subscription: Subscription, table: ChunkTable) -> None:
        """Refuse a table before any memory is allocated for it."""
        for what, expected, found in (
            ("the job's num_slots", self._num_slots, table.num_slots),
            ("its subscription's plan_digest", subscription.plan_digest, table.plan_digest),
        ):
            if expected != found:
                raise PlanError(
                    f"chunk table of {subscription.consumer} for rank {table.owner}: expected "
                    f"{what} {expected}, found {found}; build the plan from the job that the "
                    "rendezvous describes"
                )
        check_table(table, self._manifest, self._rank, self._sources)
        if (ring := self._rings.get(table.plan_digest)) is not None:
            check_sharing(table, ring.table)

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

    def _offer(self, served: Served, address: PeerAddress) -> Offer:
        table, arena = served.ring.table, served.ring.arena
        regions = map(arena.region, range(table.num_slots)) if arena is not None else ()
        return Offer(
            consumer=served.consumer,
            consumer_incarnation=served.incarnation.hex(),
            rank=self._rank,
            producer_incarnation=self._incarnation.hex(),
            wire_name=address.name,
            metadata=address.metadata,
            slots=tuple(
                SlotRegion(region.address, region.num_bytes, region.device) for region in regions
            ),
        )

    def _refuse(self, consumer: ConsumerId, incarnation: bytes, error: Exception) -> None:
        _logger.warning("producer %d refuses %s: %s", self._rank, consumer, error)
        try:
            self.dismiss(incarnation)
        finally:
            reason = f"producer {self._rank} cannot serve it: {type(error).__name__}: {error}"
            self._client.drop(consumer, incarnation.hex(), reason)

    def _ring(self, table: ChunkTable) -> ServeRing:
        ring = self._rings.get(table.plan_digest)
        if ring is None:
            ring = ServeRing(table, self._arena(table))
            try:
                if torch.device(self._device).type != "cpu":
                    ring.prepare()
            except BaseException:
                self._lay_by(ring)
                raise
            self._rings[table.plan_digest] = ring
        return ring

    def _arena(self, table: ChunkTable) -> Arena | None:
        if not table.slot_bytes:
            return None
        for arena in sorted(self._idle, key=lambda idle: idle.slot_bytes):  # large ones are kept
            if arena.num_slots >= table.num_slots and arena.slot_bytes >= table.slot_bytes:
                self._idle.remove(arena)
                return arena
        arena = Arena(table.num_slots, table.slot_bytes, self._device)
        self._progress.call(lambda wire: wire.register([arena.buffer]), ADMIT_TIMEOUT_SECONDS)
        return arena

    def get(self, incarnation: bytes) -> Served | None:
        """The consumer with that incarnation, if this producer serves it."""
        return self._served.get(incarnation)

    def live(self, record: EpochRecord) -> dict[ConsumerId, Served]:
        """Those of the record's consumers that this producer serves."""
        served = {who: self.get(bytes.fromhex(incarnation)) for who, incarnation in record.live}
        return {who: each for who, each in served.items() if each is not None}

    def dismiss(self, incarnation: bytes) -> None:
        """Forget a consumer that left or was dropped; the last reader leaves its ring idle."""
        peers = self._progress.peers
        if (newcomer := self._newcomers.pop(incarnation, None)) is not None:
            self._leave(newcomer.ring, incarnation)
            unmet = newcomer.peer.name
            self._progress.call(lambda wire: peers.give_up(wire, unmet), ADMIT_TIMEOUT_SECONDS)
        if (served := self._served.pop(incarnation, None)) is not None:
            self._leave(served.ring, incarnation)
            name = served.wire_name
            self._progress.call(lambda wire: peers.leave(wire, name), ADMIT_TIMEOUT_SECONDS)

    def _leave(self, ring: ServeRing, incarnation: bytes) -> None:
        del ring.readers[incarnation]
        if not ring.readers:
            del self._rings[ring.table.plan_digest]
            self._lay_by(ring)

    def _lay_by(self, ring: ServeRing) -> None:
        """Its slots are for the next ring that they fit."""
        if ring.arena is not None:
            self._idle.append(ring.arena)
