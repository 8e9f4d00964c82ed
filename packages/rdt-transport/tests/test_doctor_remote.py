import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_transport.doctor._probe import Source
from rdt_transport.doctor.examination import HostFacts
from rdt_transport.doctor.remote import Offer, decode_offer, encode_offer, parse_address, visit
from rdt_transport.errors import WireError
from rdt_transport.wire.base import PeerAddress, Region

sources = st.builds(
    Source,
    st.builds(PeerAddress, st.text(), st.binary()),
    st.builds(Region, st.integers(0), st.integers(0), st.integers(0)),
    st.integers(0),
)
hosts = st.builds(HostFacts, st.text(), rdma_devices=st.lists(st.text(), max_size=2).map(tuple))
OFFER = Offer(HostFacts("x"), {"cpu": Source(PeerAddress("a", b"\x00\xff"), Region(1, 2), 3)})


@given(st.builds(Offer, hosts, st.dictionaries(st.text(), sources, max_size=3)))
def test_an_offer_is_one_line_and_the_same_again(offer: Offer) -> None:
    line = encode_offer(offer)

    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode_offer(line) == offer


@given(st.binary() | st.recursive(
    st.none() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(
        st.sampled_from(["schema", "host", "sources", "cpu", "region"]), each
    ),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_offer(line)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        encode_offer(OFFER).replace(b'"pid": 3', b'"pid": Infinity'),
        encode_offer(OFFER).replace(b'"AP8="', b'"A!P8="'),
    ],
)
def test_a_line_made_to_break_its_reader_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_offer(line)


def test_another_schema_says_to_install_the_same_release() -> None:
    record = {**json.loads(encode_offer(OFFER)), "schema": 2}

    with pytest.raises(WireError, match="the same release"):
        decode_offer(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a:1", ("a", 1)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:x", "a:65536", "a:-1", "a:\u0661"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


def visited(answer: bytes) -> Offer:
    """What a visitor makes of a server that sends ``answer`` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        try:
            with visit(f"127.0.0.1:{listener.getsockname()[1]}", 10.0) as offer:
                return offer
        finally:
            thread.join()


def test_a_visitor_takes_the_line_and_knows_loopback() -> None:
    offer = visited(encode_offer(OFFER))

    assert offer.sources == OFFER.sources and offer.is_loopback


@pytest.mark.parametrize("answer", [b"", b'{"schema":', b"HTTP/1.1 400 Bad Request\r\n"])
def test_a_visitor_refuses_who_is_no_doctor(answer: bytes) -> None:
    with pytest.raises(WireError):
        visited(answer)


def test_a_visitor_of_a_silent_server_ends_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        with pytest.raises(WireError, match=f"{address} sent no whole line"):
            with visit(address, 0.2):
                pass


def test_nobody_there_says_how_to_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

    with pytest.raises(WireError, match="start rdt-doctor --serve there"):
        with visit(address, 5.0):
            pass
