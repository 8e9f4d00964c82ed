from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan.doorbell import MAGIC, NUM_BYTES, VERSION, Doorbell, Kind
from rdt_plan.errors import PeerProtocolError, ProtocolError

IDS = st.binary(min_size=16, max_size=16)
U32 = st.integers(0, 2**32 - 1)
DOORBELLS = st.builds(Doorbell, IDS, U32, IDS, IDS, st.sampled_from(Kind), U32)
SAMPLE = Doorbell(bytes(range(16)), 7, b"s" * 16, b"r" * 16, Kind.DONE, 258)


@given(DOORBELLS)
def test_a_doorbell_survives_the_wire(doorbell: Doorbell) -> None:
    message = doorbell.encode()
    assert len(message) == NUM_BYTES
    assert Doorbell.decode(message) == doorbell


def test_the_layout_is_fixed() -> None:
    assert SAMPLE.encode() == (
        b"rdtD\x01\x02\0\0"
        + b"\x02\x01\0\0"
        + b"\x07\0\0\0"
        + bytes(range(16))
        + b"s" * 16
        + b"r" * 16
    )


@given(st.binary(max_size=80))
def test_any_bytes_are_a_doorbell_or_refused(message: bytes) -> None:
    try:
        doorbell = Doorbell.decode(message)
    except PeerProtocolError:
        return
    assert doorbell.encode() == message


@given(st.binary(min_size=NUM_BYTES - 6, max_size=NUM_BYTES - 6), st.integers(0, 255))
def test_any_kind_is_known_or_refused(rest: bytes, kind: int) -> None:
    message = MAGIC + bytes([VERSION, kind]) + rest
    try:
        doorbell = Doorbell.decode(message)
    except PeerProtocolError:
        assert kind not in list(Kind) or rest[:2] != bytes(2)
    else:
        assert doorbell.encode() == message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "expected 64 bytes, found 0"),
        (SAMPLE.encode() + b"\0", "expected 64 bytes, found 65"),
        (b"nope" + SAMPLE.encode()[4:], "magic"),
        (MAGIC + b"\x02" + SAMPLE.encode()[5:], "expected version 1, found 2"),
        (MAGIC + b"\x01\x09" + SAMPLE.encode()[6:], "unknown kind 9"),
        (MAGIC + b"\x01\x01\x01" + SAMPLE.encode()[7:], "reserved"),
    ],
)
def test_a_peer_is_told_what_is_wrong(message: bytes, says: str) -> None:
    with pytest.raises(PeerProtocolError, match=says):
        Doorbell.decode(message)


@pytest.mark.parametrize(
    "change",
    [
        {"session": b"short"},
        {"sender": "s" * 16},
        {"receiver": b""},
        {"epoch": -1},
        {"epoch": 2**32},
        {"seq": 1.0},
        {"seq": True},
        {"kind": 1},
    ],
)
def test_what_does_not_fit_is_our_misuse(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(change))):
        replace(SAMPLE, **change)
