"""Records of a job without tensors: for tests of whatever talks to a rendezvous."""

import uuid

from rdt_plan import WIRE_VERSION, ChunkTable, ConsumerId
from rdt_plan.records import Offer, ProducerRecord, SlotRegion, Subscription

__all__ = ["MANIFEST_DIGEST", "incarnation", "make_offer", "make_producer", "make_subscription"]

MANIFEST_DIGEST = "a" * 64
PLAN_DIGEST = "b" * 64


def incarnation() -> str:
    """A fresh incarnation, or session: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def make_producer(rank: int, *, manifest_digest: str = MANIFEST_DIGEST) -> ProducerRecord:
    """A new incarnation of producer ``rank``."""
    return ProducerRecord(
        rank=rank,
        incarnation=incarnation(),
        wire_name=f"producer-{rank}",
        metadata=b"\x00metadata",
        manifest_digest=manifest_digest,
    )


def make_subscription(
    replica: int,
    worker: int,
    *,
    num_workers: int = 1,
    owners: tuple[int, ...] = (0,),
    num_slots: int = 2,
    wire_version: int = WIRE_VERSION,
) -> Subscription:
    """A new incarnation of a consumer that reads from ``owners``; its tables hold no chunk."""
    consumer = ConsumerId(replica, worker)
    return Subscription(
        consumer=consumer,
        num_workers=num_workers,
        incarnation=incarnation(),
        wire_name=f"consumer-{consumer}",
        metadata=b"\xffmetadata",
        wire_version=wire_version,
        plan_digest=PLAN_DIGEST,
        tables=tuple(
            ChunkTable(
                consumer=consumer,
                owner=owner,
                plan_digest=PLAN_DIGEST,
                num_slots=num_slots,
                slot_bytes=64,
                chunks=(),
            )
            for owner in owners
        ),
    )


def make_offer(subscription: Subscription, producer: ProducerRecord) -> Offer:
    """What that producer offers to that consumer."""
    return Offer(
        consumer=subscription.consumer,
        consumer_incarnation=subscription.incarnation,
        rank=producer.rank,
        producer_incarnation=producer.incarnation,
        wire_name=producer.wire_name,
        metadata=producer.metadata,
        slots=(SlotRegion(4096, 64, 0), SlotRegion(4160, 64, 0)),
    )
