"""The wire format's page: its examples, byte for byte, and its tables, against the code."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from rdt_plan import (
    ConsumerId,
    Doorbell,
    EpochRecord,
    JobRecord,
    Kind,
    Manifest,
    Offer,
    ParamMeta,
    Placement,
    ProducerRecord,
    Slice,
    Subscription,
    build_plan,
    decode_manifest,
    decode_table,
    encode_manifest,
    encode_table,
)
from rdt_plan.testing.reference import serve_chunk
from rdt_transport.rendezvous import protocol
from rdt_transport.rendezvous.events import PushedEvent
from rdt_transport.rendezvous.requests import Request
from rdt_transport.wire._metadata import WireMetadata
from rdt_transport.wire._regions import RegisteredRange

PAGE = (Path(__file__).parent.parent / "docs" / "wire-format.md").read_text()
EXAMPLES = re.findall(r"^```(?:json)?\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
MANIFEST, DIGEST, TABLE, CHUNK, DOORBELL, PROOF, METADATA = EXAMPLES

HELD = Manifest.build(
    [
        ParamMeta("embed", "bfloat16", (4, 2), (0, 1)),
        ParamMeta("layers.0.w", "float32", (6, 2), (0, 1), (2,), ("shard(0)",)),
    ]
)


def copy(region: Slice) -> Placement:
    return Placement(region, "m", "p", 0, region.shape, (1,), region.dtype, (1,))


def planned() -> str:
    regions = [
        Slice("embed", "bfloat16", 2, (3,), (1,)),
        Slice("embed", "bfloat16", 6, (2,), (1,)),
        Slice("layers.0.w", "float32", 1, (3,), (2,)),
    ]
    plan = build_plan(HELD, [copy(region) for region in regions], ConsumerId(0, 0), num_workers=1)
    return encode_table(replace(plan.table(0), plan_digest="ab" * 32), HELD.numbers).decode()


def test_the_messages_are_what_the_code_writes_and_reads() -> None:
    assert encode_manifest(HELD).decode() == MANIFEST
    assert decode_manifest(MANIFEST.encode()) == HELD
    assert HELD.digest == DIGEST
    assert planned() == TABLE


def test_the_chunk_is_packed_as_it_says() -> None:
    (chunk, _) = decode_table(TABLE.encode(), ConsumerId(0, 0), HELD.names).chunks
    packed = serve_chunk(chunk, {"embed": bytes(range(16))})
    shown = CHUNK.split()
    assert len(packed) == len(shown) == chunk.num_bytes
    assert [
        f"{byte:02x}" if s != ".." else s for byte, s in zip(packed, shown, strict=True)
    ] == shown
    assert shown.count("..") == 10


def test_the_doorbell_is_what_the_code_writes_and_reads() -> None:
    bell = Doorbell(bytes(range(16)), 7, b"s" * 16, b"r" * 16, Kind.DONE, 258)
    assert bell.encode() == bytes.fromhex(DOORBELL)
    assert Doorbell.decode(bytes.fromhex(DOORBELL)) == bell


def test_the_proof_is_what_both_ends_compute() -> None:
    assert protocol._proof("secret", "client", "job", "n1", "n2") == PROOF


def test_the_metadata_is_what_the_wire_writes_and_reads() -> None:
    ranges = (RegisteredRange(0x2000, 64, 0, "DRAM"),)
    metadata = WireMetadata(0x1000, ranges, b"nixl")
    assert metadata.encode() == bytes.fromhex(METADATA)
    assert WireMetadata.decode("peer", bytes.fromhex(METADATA)) == metadata


def rows(head: str) -> dict[str, set[str]]:
    """The first column of the table under ``head``, and the names in backquotes in the second."""
    table = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    cells = [line.strip("| ").split(" | ") for line in table]
    return {cell[0].strip("`"): set(re.findall(r"`(\w+)`", cell[1])) for cell in cells}


def test_every_request_and_event_is_listed_with_its_fields() -> None:
    for head, kinds in (
        ("| request | fields | answer, and what it waits for |\n", get_args(Request)),
        ("| event | fields | |\n", get_args(PushedEvent)),
    ):
        expected = {kind.__name__: {field.name for field in fields(kind)} for kind in kinds}
        assert rows(head) == expected


def test_every_record_is_listed_with_its_fields() -> None:
    records = {
        "producer": ProducerRecord,
        "job": JobRecord,
        "subscription": Subscription,
        "offer": Offer,
        "epoch": EpochRecord,
    }
    expected = {name: {field.name for field in fields(kind)} for name, kind in records.items()}
    assert rows("| record | fields |\n") == expected
