import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.errors import WireError
from rdt_transport.wire._metadata import WireMetadata
from rdt_transport.wire._regions import RegisteredRange

METADATA = WireMetadata(
    7, (RegisteredRange(16, 32, 0, "DRAM"), RegisteredRange(64, 8, 1, "VRAM")), b"nixl's own"
)


def test_metadata_comes_back() -> None:
    assert WireMetadata.decode("peer", METADATA.encode()) == METADATA


@given(st.data())
def test_a_flipped_bit_or_a_missing_end_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(METADATA.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    if data.draw(st.booleans()):
        encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del encoded[at:]
    with pytest.raises(WireError, match="metadata of peer is"):
        WireMetadata.decode("peer", bytes(encoded))
