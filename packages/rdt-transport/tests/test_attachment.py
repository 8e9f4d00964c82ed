"""What an attaching consumer refuses: offers and records that its plan cannot be read from."""

from dataclasses import replace

import pytest

from rdt_plan import (
    ConsumerId,
    DirectRule,
    Manifest,
    ParamMeta,
    Placement,
    SlotRegion,
    SyncPlan,
    build_plan,
    encode_manifest,
    whole,
)
from rdt_plan.records import JobRecord, SourceRegion
from rdt_plan.wire import WIRE_VERSION
from rdt_transport.attachment import Attachment, _sources
from rdt_transport.errors import DisagreementError
from rdt_transport.testing.job_records import (
    incarnation,
    make_offer,
    make_producer,
    make_subscription,
)

MANIFEST = Manifest.build([ParamMeta(name, "int8", (40,)) for name in ("a", "b")])
WRITES = [Placement(whole(p), "m", p.name, 0, (40,), (1,), "int8", (1,)) for p in MANIFEST.params]


def test_slots_that_are_missing_or_too_small_are_refused() -> None:
    plan = build_plan(MANIFEST, WRITES, ConsumerId(0, 0), num_workers=1)
    (chunk,) = plan.chunks
    attachment = Attachment(None, plan)
    offer = make_offer(make_subscription(0, 0), make_producer(0))

    fits = replace(offer, slots=(SlotRegion(4096, chunk.serve.num_bytes, 6),))
    _, remote = attachment._slot_pair(chunk, fits, 0)
    assert (remote.address, remote.num_bytes, remote.device) == (4096, chunk.serve.num_bytes, 6)
    for slots in ((), (SlotRegion(4096, chunk.serve.num_bytes - 1, 0),)):
        with pytest.raises(DisagreementError, match=rf"offers {len(slots)} serve slots .* chunk 0"):
            attachment._slot_pair(chunk, replace(offer, slots=slots), 0)


def job_of(*sources: SourceRegion) -> JobRecord:
    producer = replace(make_producer(0), sources=sources)
    return JobRecord(
        job="job",
        session=incarnation(),
        wire_version=WIRE_VERSION,
        num_producers=1,
        num_slots=2,
        max_chunk_bytes=1 << 20,
        lookahead=1,
        num_replicas=1,
        producers=(producer,),
        manifest=encode_manifest(MANIFEST),
    )


def test_sources_of_what_is_read_directly_are_found_by_name() -> None:
    """Names that nobody has published are `direct_pairs`' to miss, and so are strangers' ranks."""
    job = job_of(SourceRegion(0, 512, 0), region := SourceRegion(1, 4096, 0))
    offer = make_offer(make_subscription(0, 0), job.producers[0])

    assert _sources(job, MANIFEST.numbers, direct_plan("b"), {0: offer}) == {0: {"b": region}}
    nowhere = replace(job, producers=(replace(job.producers[0], sources=()),))
    assert _sources(nowhere, MANIFEST.numbers, direct_plan("b"), {0: offer}) == {0: {}}
    assert _sources(job, {}, direct_plan("b"), {0: offer}) == {0: {}}
    assert _sources(job, MANIFEST.numbers, direct_plan("a", "b"), {}) == {}


def direct_plan(*params: str) -> SyncPlan:
    rule = DirectRule({0: frozenset({"a", "b"})}, frozenset(("m", param) for param in params))
    return build_plan(MANIFEST, WRITES, ConsumerId(0, 0), num_workers=1, direct=rule)


def test_sources_of_another_incarnation_than_the_offer_s_are_refused() -> None:
    offer = make_offer(make_subscription(0, 0), make_producer(0))

    with pytest.raises(DisagreementError, match="producer 0 was replaced while this worker attac"):
        _sources(job_of(), MANIFEST.numbers, direct_plan("a"), {0: offer})
