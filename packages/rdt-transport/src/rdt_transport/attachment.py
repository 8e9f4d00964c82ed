"""A consumer's attachment to its producers: receive ring, peers, and one prepared read a chunk."""

import time
import uuid
from collections.abc import Mapping

import torch

from rdt_plan import (
    Chunk,
    Doorbell,
    EpochRecord,
    Kind,
    Offer,
    Subscription,
    SyncPlan,
)
from rdt_plan.records import JobRecord, SourceRegion, Sources
from rdt_plan.wire import WIRE_VERSION
from rdt_transport.destinations import Destination, Destinations
from rdt_transport.direct_reads import direct_pairs
from rdt_transport.errors import DisagreementError, WireError
from rdt_transport.progress import Endpoint, ProgressThread
from rdt_transport.receive_ring import ReceiveRing
from rdt_transport.rendezvous import RendezvousClient
from rdt_transport.wire.base import PeerAddress, ReadHandle, Region, RegionPair, Wire

__all__ = ["Attachment"]


class Attachment:
    """What stays the same over all epochs of one consumer incarnation.

    ``open``, ``check`` and ``close`` are called by the consumer's caller; ``post``, ``index`` and
    ``rank`` on the progress thread.
    """

    def __init__(
        self,
        progress: ProgressThread,
        plan: SyncPlan,
        device: torch.device | str = "cpu",
        destination: Destination | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().bytes
        self._progress = progress
        self._plan = plan
        self._ring = ReceiveRing(plan, device)
        self._destinations = Destinations(plan, destination)
        self._handles: list[ReadHandle] = []
        self._index: dict[ReadHandle, int] = {}
        self._rank: dict[bytes, int] = {}
        self._producer: dict[int, bytes] = {}
        self._wire_name: dict[bytes, str] = {}
        self._peers: list[str] = []

    def open(
        self,
        endpoint: Endpoint,
        client: RendezvousClient,
        num_workers: int,
        timeout_seconds: float,
    ) -> None:
        """Subscribe, meet every owner, prepare the reads, and report ready.

        Raises `RendezvousError` or `WireError` subclasses naming what was waited for.
        """
        deadline = time.monotonic() + timeout_seconds

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        plan, progress = self._plan, self._progress
        buffers = [self._ring.buffer, *self._destinations.buffers]
        progress.call(lambda wire: wire.register(buffers), left())
        address = progress.call(lambda wire: wire.address(), left())
        subscription = Subscription(
            consumer=plan.consumer,
            num_workers=num_workers,
            incarnation=self.incarnation.hex(),
            wire_name=address.name,
            metadata=address.metadata,
            wire_version=WIRE_VERSION,
            plan_digest=plan.digest,
            tables=tuple(plan.table(owner) for owner in plan.owners),
        )
        progress.attach(endpoint)
        client.subscribe(subscription, left())
        offers = {offer.rank: offer for offer in client.offers(plan.consumer, left())}
        for offer in offers.values():
            self._meet(offer, left())
        sources = {}
        if self._destinations.buffers:
            sources = _sources(client.job(left()), client.numbers(), plan, offers)
        progress.call(lambda wire: self._prepare(wire, endpoint, offers, sources), left())
        client.ready(plan.consumer, self.incarnation.hex())

    def _meet(self, offer: Offer, timeout_seconds: float) -> None:
        peer = PeerAddress(offer.wire_name, offer.metadata)
        peers = self._progress.peers

        def meet(wire: Wire) -> None:
            try:
                peers.meet(wire, peer, timeout_seconds)
            except WireError:
                peers.give_up(wire, peer.name)
                raise
            self._peers.append(peer.name)

        self._progress.call(meet, timeout_seconds)
        incarnation = bytes.fromhex(offer.producer_incarnation)
        self._wire_name[incarnation] = offer.wire_name
        self._rank[incarnation] = offer.rank
        self._producer[offer.rank] = incarnation

    def _prepare(
        self,
        wire: Wire,
        endpoint: Endpoint,
        offers: Mapping[int, Offer],
        sources: Mapping[int, Mapping[str, SourceRegion]],
    ) -> None:
        for chunk in self._plan.chunks:
            offer = offers[chunk.owner]
            if chunk.serve.serve_slot is None:
                pairs = list(direct_pairs(chunk, sources[chunk.owner], self._destinations.find))
            else:
                pairs = [self._slot_pair(chunk, offer, chunk.serve.serve_slot)]
            handle = wire.prepare_read(offer.wire_name, pairs)
            self._progress.own(handle, endpoint)
            self._index[handle] = chunk.index
            self._handles.append(handle)

    def _slot_pair(self, chunk: Chunk, offer: Offer, serve_slot: int) -> RegionPair:
        num_bytes = chunk.serve.num_bytes
        slots = offer.slots[serve_slot:][:1]
        if not slots or num_bytes > slots[0].num_bytes:
            raise DisagreementError(
                f"producer {chunk.owner} offers {len(offer.slots)} serve slots {list(slots)}, "
                f"chunk {chunk.index} packs {num_bytes} bytes into slot {serve_slot}; install one "
                "version of rdt on both sides"
            )
        return self._ring.region(chunk), Region(slots[0].address, num_bytes, slots[0].device)

    def check(self) -> None:
        """Raise `WireError` by name when a tensor that direct reads land in was replaced."""
        self._destinations.check()

    def post(self, wire: Wire, chunk: Chunk, record: EpochRecord) -> None:
        """Start reading ``chunk``; its DONE rides the read's own notification."""
        done = Doorbell(
            session=bytes.fromhex(record.session),
            epoch=record.epoch,
            sender=self.incarnation,
            receiver=self._producer[chunk.owner],
            kind=Kind.DONE,
            seq=chunk.serve.seq,
        )
        wire.post(self._handles[chunk.index], done.encode())

    def index(self, handle: ReadHandle) -> int:
        """The plan index of the chunk that ``handle`` reads."""
        return self._index[handle]

    def rank(self, incarnation: bytes) -> int | None:
        """The rank of the producer with that incarnation; None for a stranger."""
        return self._rank.get(incarnation)

    def is_from(self, incarnation: bytes, wire_name: str) -> bool:
        """Whether the producer with that incarnation made its offer for the wire ``wire_name``."""
        return self._wire_name.get(incarnation) == wire_name

    def packed(self, chunk: Chunk) -> torch.Tensor:
        """The received bytes of ``chunk``: a view of its receive slot."""
        return self._ring.packed(chunk)

    def close(self, endpoint: Endpoint) -> None:
        """Give the handles back, then forget the peers. Nothing may be in flight. Idempotent."""

        def drop(wire: Wire) -> None:
            while self._handles:
                wire.release(self._handles.pop())
            while self._peers:
                self._progress.peers.leave(wire, self._peers.pop())

        try:
            self._progress.call(drop, 10.0)
        finally:
            self._progress.detach(endpoint)


def _sources(
    job: JobRecord, numbers: Mapping[str, int], plan: SyncPlan, offers: Mapping[int, Offer]
) -> dict[int, dict[str, SourceRegion]]:
    """By rank, where what the plan reads directly lies, as those who made the offers say.

    ``numbers``: positions of the manifest's names.
    """
    names: dict[int, set[str]] = {}
    for chunk in plan.chunks:
        if chunk.is_direct:
            names.setdefault(chunk.owner, set()).update([each.name for each in chunk.serve.slices])
    found = {}
    for producer in job.producers:
        offer = offers.get(producer.rank)
        if offer is None:
            continue
        if offer.producer_incarnation != producer.incarnation:
            raise DisagreementError(
                f"producer {producer.rank} was replaced while this worker attached; initialise the "
                "weight transfer again"
            )
        called = {numbers.get(name, -1): name for name in names.get(producer.rank, ())}
        regions = Sources.of(producer.sources).among(called)
        found[producer.rank] = {called[region.param]: region for region in regions}
    return found
