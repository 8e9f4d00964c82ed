"""The rendezvous' wire, spoken by hand: what strangers and broken peers get to see."""

import queue
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from rdt_transport.errors import (
    RendezvousError,
    RendezvousProtocolError,
    TokenError,
    VersionMismatchError,
)
from rdt_transport.rendezvous import (
    JobSettings,
    LocalHost,
    ProducerLost,
    RendezvousAddress,
    RendezvousClient,
    host_local,
)
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.messages import encode_message
from rdt_transport.rendezvous.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    encode_frame,
    error_of,
)
from rdt_transport.testing.job_records import make_producer
from rdt_transport.testing.rendezvous_peers import JOB, TOKEN, WAIT_SECONDS, Peer, proof


@pytest.fixture
def host() -> Iterator[LocalHost]:
    host = host_local(JOB, TOKEN, JobSettings(num_producers=1, lease_seconds=30.0))
    yield host
    host.close()


@pytest.fixture
def peer(host: LocalHost) -> Iterator[Peer]:
    with socket.create_connection((host.address.host, host.address.port)) as sock:
        yield Peer(sock)


def refused_with(peer: Peer, kind: type[RendezvousError], said: str) -> None:
    frame = peer.receive()
    assert frame["kind"] == "refusal"
    assert frame["error"] == kind.__name__
    assert said in frame["message"]
    assert type(error_of(frame)) is kind
    assert peer.is_closed()


# ---- strangers at the server ---------------------------------------------------------------------


def test_client_with_a_wrong_token_is_refused(host: LocalHost) -> None:
    address = RendezvousAddress(host.address.host, host.address.port, JOB, "guess")

    with pytest.raises(TokenError, match="the token given is not that of the job"):
        RendezvousClient(address)


def test_wrong_job_is_refused_naming_both(host: LocalHost) -> None:
    address = RendezvousAddress(host.address.host, host.address.port, "other", TOKEN)

    with pytest.raises(RendezvousError, match="serves job 'job', not 'other'; take the address"):
        RendezvousClient(address)


def test_other_protocol_is_refused_naming_both(peer: Peer) -> None:
    peer.send({"kind": "hello", "protocol": PROTOCOL_VERSION + 1, "job": JOB, "nonce": "ab"})

    frame = peer.receive()

    assert frame["error"] == VersionMismatchError.__name__
    assert f"version {PROTOCOL_VERSION + 1}" in frame["message"]
    assert f"version {PROTOCOL_VERSION};" in frame["message"]
    assert "upgrade rdt-transport" in frame["message"]


def test_recorded_proof_proves_nothing(host: LocalHost) -> None:
    proofs = []
    for _ in range(2):
        with socket.create_connection((host.address.host, host.address.port)) as sock:
            peer = Peer(sock)
            peer.send({"kind": "hello", "protocol": PROTOCOL_VERSION, "job": JOB, "nonce": "ab"})
            proofs.append(proof("client", "ab", peer.receive()["nonce"]))
            peer.send({"kind": "proof", "proof": proofs[0]})
            outcome = peer.receive()

    assert outcome["kind"] == "refusal"
    assert outcome["error"] == TokenError.__name__


@pytest.mark.parametrize("given", ["", "\ud800", "00" * 32])
def test_nonsense_proves_nothing(peer: Peer, given: str) -> None:
    peer.send({"kind": "hello", "protocol": PROTOCOL_VERSION, "job": JOB, "nonce": "ab"})
    peer.receive()
    peer.send({"kind": "proof", "proof": given})

    refused_with(peer, TokenError, "is not that of the job")


def test_call_before_the_proof_touches_nothing(host: LocalHost, peer: Peer) -> None:
    producer = encode_message(ask.Publish(make_producer(0), b"stolen"))
    peer.send({"kind": "hello", "protocol": PROTOCOL_VERSION, "job": JOB, "nonce": "ab"})
    peer.receive()
    peer.send({"kind": "call", "call": 1, "timeout_seconds": 5.0, "request": producer})

    refused_with(peer, RendezvousProtocolError, "expected a proof frame")
    with RendezvousClient(host.address) as client:
        client.publish(make_producer(0), b"ours", WAIT_SECONDS)  # the rank is free
        assert client.job(WAIT_SECONDS).manifest == b"ours"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 4097),
        struct.pack(">I", 0),
        struct.pack(">I", 4) + b"\xff\xfe\x00\x00",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4000) + b"[" * 4000,
        struct.pack(">I", 12) + b'{"kind": 12}',
    ],
)
def test_garbage_is_answered_with_a_typed_error(peer: Peer, garbage: bytes) -> None:
    peer.sock.sendall(garbage)

    refused_with(peer, RendezvousProtocolError, "frame")


# ---- broken peers that know the token ------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 1) + b"{",
        struct.pack(">I", 200_000) + b'{"kind":' + b"[" * 199_992,
        encode_frame({"kind": "hello"}),
        encode_frame({"kind": "call", "call": "1", "timeout_seconds": 1, "request": {}}),
        encode_frame({"kind": "call", "call": 1, "timeout_seconds": 10**400, "request": {}}),
        encode_frame({"kind": "call", "call": 1, "timeout_seconds": -1, "request": {}}),
        encode_frame({"kind": "call", "call": 1, "timeout_seconds": float("nan"), "request": {}}),
    ],
)
def test_malformed_frame_ends_the_connection_and_its_roles(
    host: LocalHost, peer: Peer, garbage: bytes
) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    peer.prove()
    assert peer.call(ask.Publish(make_producer(0), b"manifest"))["kind"] == "answer"

    with RendezvousClient(host.address, on_event=events.put):
        peer.sock.sendall(garbage)

        refused_with(peer, RendezvousProtocolError, "")
        lost = events.get(timeout=WAIT_SECONDS)
    assert isinstance(lost, ProducerLost)
    assert "it broke the protocol" in lost.reason


def test_malformed_request_is_refused_and_the_connection_stays(peer: Peer) -> None:
    peer.prove()
    peer.send({"kind": "call", "call": 7, "timeout_seconds": 1, "request": {"kind": "Begin"}})

    refused = peer.receive()

    assert (refused["kind"], refused["call"]) == ("refusal", 7)
    assert refused["error"] == RendezvousProtocolError.__name__
    peer.send({"kind": "heartbeat"})
    assert peer.receive() == {"kind": "heartbeat"}


def test_frame_above_the_limit_is_not_sent() -> None:
    with pytest.raises(RendezvousProtocolError, match=r"call frame of .* exceeds the limit of 10"):
        encode_frame({"kind": "call", "call": 1}, 10)


def test_unknown_error_of_a_newer_server_is_still_ours() -> None:
    for name in ("NewFangledError", "RdtTransportErro", "__builtins__", None, 3, ["x"]):
        error = error_of({"kind": "refusal", "error": name, "message": "why"})
        assert type(error) is RendezvousError
        assert str(error) == "why"
