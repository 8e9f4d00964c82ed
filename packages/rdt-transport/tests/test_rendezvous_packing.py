"""Packing: what was packed comes back, and nothing else is taken for it."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.errors import RendezvousProtocolError
from rdt_transport.rendezvous import packing
from rdt_transport.rendezvous.packing import pack, unpack


@given(st.binary(max_size=200))
def test_unpacked_is_what_was_packed(data: bytes) -> None:
    assert unpack(pack(data)) == data


@pytest.mark.parametrize(
    "packed", [b"", b"{}", pack(b"data")[:-1], pack(b"data") + b"x", zlib.compress(b"data")[1:]]
)
def test_what_was_not_packed_is_refused(packed: bytes) -> None:
    with pytest.raises(RendezvousProtocolError, match="packed message"):
        unpack(packed)


def test_no_more_is_unpacked_than_a_message_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_MESSAGE_BYTES", 1000)
    assert len(unpack(pack(bytes(1000)))) == 1000
    with pytest.raises(RendezvousProtocolError, match="at most 1000 bytes"):
        unpack(pack(bytes(1001)))
