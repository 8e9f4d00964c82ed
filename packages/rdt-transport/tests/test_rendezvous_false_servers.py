"""Servers that are not the rendezvous, or break its protocol: what becomes of their client."""

import hashlib
import queue
import struct
from typing import Any

import pytest

from rdt_plan.records import ProducerRecord
from rdt_transport.errors import (
    RendezvousError,
    RendezvousProtocolError,
    TokenError,
)
from rdt_transport.rendezvous import (
    ConnectionLost,
    RendezvousClient,
)
from rdt_transport.rendezvous.protocol import (
    MAX_FRAME_BYTES,
    encode_frame,
)
from rdt_transport.testing.job_records import make_producer
from rdt_transport.testing.rendezvous_peers import (
    TOKEN,
    WAIT_SECONDS,
    Peer,
    false_server,
    proof,
)


def greet(peer: Peer, lease_seconds: float = 30.0) -> None:
    """The server's half of the handshake."""
    nonce = peer.receive()["nonce"]
    peer.send({"kind": "challenge", "nonce": "cd"})
    assert peer.receive() == {"kind": "proof", "proof": proof("client", nonce, "cd")}
    peer.send(
        {
            "kind": "welcome",
            "proof": proof("server", nonce, "cd"),
            "lease_seconds": lease_seconds,
        }
    )


@pytest.mark.parametrize("how", ["guesses", "reflects"])
def test_server_without_the_token_is_refused(how: str) -> None:
    def speak(peer: Peer) -> None:
        peer.receive()
        peer.send({"kind": "challenge", "nonce": "cd"})
        theirs = peer.receive()["proof"]
        given = theirs if how == "reflects" else "00" * 32
        peer.send({"kind": "welcome", "proof": given, "lease_seconds": 30.0})
        peer.is_closed()

    with pytest.raises(TokenError, match="did not prove the token of job 'job'"):
        RendezvousClient(false_server(speak))


def test_token_is_never_sent() -> None:
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def speak(peer: Peer) -> None:
        greet(peer)
        peer.receive()
        heard.put(peer.received)

    with pytest.raises(RendezvousError), RendezvousClient(false_server(speak)) as client:
        client.publish(make_producer(0), b"", WAIT_SECONDS)

    received = heard.get(timeout=WAIT_SECONDS)
    assert b"publish" in received.lower()
    assert TOKEN.encode() not in received
    assert hashlib.sha256(TOKEN.encode()).hexdigest().encode() not in received


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        encode_frame({"kind": "welcome", "proof": "", "lease_seconds": 1}),
        encode_frame({"kind": "challenge", "nonce": 5}),
    ],
)
def test_server_of_something_else(answer: bytes) -> None:
    def speak(peer: Peer) -> None:
        peer.receive()
        peer.sock.sendall(answer)
        peer.is_closed()

    with pytest.raises(RendezvousProtocolError):
        RendezvousClient(false_server(speak))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (encode_frame({"kind": "event", "event": {"kind": "Riot"}}), RendezvousProtocolError),
        (encode_frame({"kind": "event"}), RendezvousProtocolError),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), RendezvousProtocolError),
        (
            encode_frame({"kind": "refusal", "call": None, "error": "TokenError", "message": "m"}),
            TokenError,
        ),
    ],
)
def test_malformed_frame_of_a_server_ends_the_client(
    said: bytes, kind: type[RendezvousError]
) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def speak(peer: Peer) -> None:
        greet(peer)
        peer.receive()
        peer.sock.sendall(said)
        peer.is_closed()

    with RendezvousClient(false_server(speak), on_event=events.put) as client:
        with pytest.raises(kind):
            client.job(WAIT_SECONDS)
        assert isinstance(events.get(timeout=WAIT_SECONDS), ConnectionLost)
        with pytest.raises(kind):
            client.leave()


def test_malformed_answer_ends_its_call_only() -> None:
    record: ProducerRecord = make_producer(0)

    def speak(peer: Peer) -> None:
        greet(peer)
        peer.send({"kind": "answer", "call": peer.receive()["call"], "value": {"job": 1}})
        peer.send({"kind": "answer", "call": peer.receive()["call"], "value": False})
        peer.is_closed()

    with RendezvousClient(false_server(speak)) as client:
        with pytest.raises(RendezvousProtocolError, match="malformed JobRecord"):
            client.job(WAIT_SECONDS)
        client.publish(record, b"", WAIT_SECONDS)


def test_silent_server_is_lost_after_a_lease() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def speak(peer: Peer) -> None:
        greet(peer, lease_seconds=0.2)
        while peer.receive():
            pass  # hears the heartbeats, and answers none

    with RendezvousClient(false_server(speak), on_event=events.put) as client:
        with pytest.raises(RendezvousError, match=r"silent for 0\.2 s"):
            client.job(WAIT_SECONDS)
        assert "silent" in events.get(timeout=WAIT_SECONDS).reason
