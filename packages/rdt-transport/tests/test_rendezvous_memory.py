"""What the rendezvous keeps grows with names and with consumers, no faster than they do."""

from dataclasses import replace

import pytest

from rdt_plan import ConsumerId, Manifest, ParamMeta, Placement, build_plan, encode_manifest, whole
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.packing import pack
from rdt_transport.rendezvous.sealed import SealedOffer
from rdt_transport.testing.held_bytes import held_bytes
from rdt_transport.testing.job_records import make_offer, make_producer, make_subscription
from rdt_transport.testing.state_driver import StateDriver, subscribe

NUM_PRODUCERS = 4


def kept(num_names: int, num_consumers: int) -> int:
    """Bytes of a job's state once everybody is attached."""
    ranks = tuple(range(NUM_PRODUCERS))
    manifest = Manifest.build(
        ParamMeta(f"layers.{number}.w", "int8", (64,), ranks, (NUM_PRODUCERS,), ("shard(0)",))
        for number in range(num_names)
    )
    writes = [
        Placement(whole(param), "m", param.name, 0, (64,), (1,), "int8", (1,))
        for param in manifest.params
    ]
    plan = build_plan(manifest, writes, ConsumerId(0, 0), num_workers=1)
    driver = StateDriver(num_producers=NUM_PRODUCERS, num_replicas=num_consumers)
    producers = []
    for rank in ranks:
        record = make_producer(rank)
        producers.append((driver.connect(), record))
        driver.call(producers[rank][0], ask.Publish(record, pack(encode_manifest(manifest))))
    for replica in range(num_consumers):
        made = make_subscription(replica, 0)
        tables = tuple(plan.table(rank) for rank in ranks)
        subscription = replace(made, plan_digest=plan.digest, tables=tables)
        driver.call(driver.connect(), subscribe(subscription))
        for client, record in producers:
            offer = SealedOffer.seal(make_offer(subscription, record))
            driver.call(client, ask.MakeOffers((offer,)))
    return held_bytes(driver.state)


@pytest.mark.parametrize("num_consumers", [1, 8])
def test_state_is_linear_in_names(num_consumers: int) -> None:
    """Twice the names add no more than the first ones did, whatever the job itself takes."""
    half, whole_, twice = (kept(number, num_consumers) for number in (1000, 2000, 4000))
    assert half < whole_ < twice
    assert twice - whole_ <= 1.1 * 2 * (whole_ - half)
    assert twice < 64 * 4000 * num_consumers + 100_000  # names travel packed, and are kept so


def test_state_is_linear_in_consumers() -> None:
    few, more, most = (kept(500, number) for number in (4, 8, 16))
    assert few < more < most
    assert most - more <= 1.1 * 2 * (more - few)
