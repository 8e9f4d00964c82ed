"""Frames of the rendezvous, and the handshake that opens a connection.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON: one object with a ``kind``.
The handshake proves the job's token both ways by HMAC-SHA256 over both nonces; it is never sent::

    client  hello      protocol, job, nonce
    server  challenge  nonce
    client  proof      HMAC(token, "client", protocol, job, nonces)
    server  welcome    HMAC(token, "server", protocol, job, nonces), lease_seconds
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
from typing import Any

from rdt_transport import errors
from rdt_transport.errors import (
    RdtTransportError,
    RendezvousError,
    RendezvousLostError,
    RendezvousProtocolError,
    TokenError,
    VersionMismatchError,
)
from rdt_transport.rendezvous.address import RendezvousAddress

__all__ = [
    "COMPACT",
    "HANDSHAKE_TIMEOUT_SECONDS",
    "MAX_FRAME_BYTES",
    "MAX_TIMEOUT_SECONDS",
    "PROTOCOL_VERSION",
    "admit_client",
    "encode_frame",
    "error_of",
    "framed",
    "introduce",
    "read_frame",
    "refusal",
]

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 256 << 20  # a worker that reads 160,000 slices subscribes with about 1 MiB
MAX_HANDSHAKE_BYTES = 4096  # all a stranger can make the server hold
HANDSHAKE_TIMEOUT_SECONDS = 10.0
MAX_TIMEOUT_SECONDS = 1e8  # three years: what "for ever" becomes
COMPACT = json.JSONEncoder(separators=(",", ":"))  # one: `json.dumps` makes one a call
_LENGTH = struct.Struct(">I")
_PIECE_BYTES = 1 << 20
_NONCE_BYTES = 32

Frame = dict[str, Any]


def encode_frame(frame: Frame, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The bytes of one frame; raises `RendezvousProtocolError` when it exceeds ``max_bytes``."""
    return framed(COMPACT.encode(frame), frame.get("kind"), max_bytes)


def framed(text: str, kind: object, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The bytes of a frame that is JSON already; raises as `encode_frame` does."""
    body = text.encode()
    if len(body) > max_bytes:
        raise RendezvousProtocolError(
            f"a {kind} frame of {len(body)} bytes exceeds the limit of {max_bytes}"
        )
    return _LENGTH.pack(len(body)) + body


async def read_frame(
    reader: asyncio.StreamReader,
    max_bytes: int = MAX_FRAME_BYTES,
    heard: Callable[[], None] = lambda: None,
) -> Frame:
    """Read one frame; ``heard`` is called as its bytes arrive (a large frame is a sign of life).

    Raises `RendezvousProtocolError` for a frame that is too large or malformed, and
    `RendezvousLostError` when the connection ends.
    """
    try:
        (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if num_bytes > max_bytes:
            raise RendezvousProtocolError(
                f"a frame of {num_bytes} bytes exceeds the limit of {max_bytes}"
            )
        body = bytearray()
        while len(body) < num_bytes:
            body += await reader.readexactly(min(_PIECE_BYTES, num_bytes - len(body)))
            heard()
    except asyncio.IncompleteReadError as error:
        raise RendezvousLostError("the connection was closed") from error
    except OSError as error:
        raise RendezvousLostError(f"the connection broke: {error}") from error
    try:
        frame = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise RendezvousProtocolError(f"a frame is no JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("kind"), str):
        raise RendezvousProtocolError("a frame is no object with a kind")
    return frame


def refusal(error: Exception, call: int | None = None) -> Frame:
    """The frame that carries ``error``: of one call, or of the whole connection."""
    return {
        "kind": "refusal",
        "call": call,
        "error": type(error).__name__,
        "message": str(error),
    }


def error_of(frame: Frame) -> RdtTransportError:
    """The error in a refusal frame; names that are not ours become `RendezvousError`."""
    name = frame.get("error")
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, RdtTransportError):
        kind = RendezvousError
    return kind(str(frame.get("message")))


def _proof(token: str, role: str, job: str, client_nonce: str, server_nonce: str) -> str:
    said = json.dumps(["rdt-rendezvous", PROTOCOL_VERSION, role, job, client_nonce, server_nonce])
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _field(frame: Frame, kind: str, name: str) -> str:
    value = frame.get(name)
    if frame["kind"] != kind or not isinstance(value, str):
        raise RendezvousProtocolError(f"expected a {kind} frame with {name}, found {frame['kind']}")
    return value


async def introduce(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: RendezvousAddress
) -> float:
    """The client's half of the handshake: returns the job's lease in seconds.

    Raises `TokenError` when either end does not prove the token, `VersionMismatchError`, or
    another `RendezvousError` of the server.
    """

    async def receive() -> Frame:
        frame = await read_frame(reader, MAX_HANDSHAKE_BYTES)
        if frame["kind"] == "refusal":
            raise error_of(frame)
        return frame

    nonce = secrets.token_hex(_NONCE_BYTES)
    hello = {"kind": "hello", "protocol": PROTOCOL_VERSION, "job": address.job, "nonce": nonce}
    writer.write(encode_frame(hello, MAX_HANDSHAKE_BYTES))
    theirs = _field(await receive(), "challenge", "nonce")
    ours = _proof(address.token, "client", address.job, nonce, theirs)
    writer.write(encode_frame({"kind": "proof", "proof": ours}, MAX_HANDSHAKE_BYTES))
    welcome = await receive()
    expected = _proof(address.token, "server", address.job, nonce, theirs)
    if not _equal(_field(welcome, "welcome", "proof"), expected):
        raise TokenError(
            f"the server at {address} did not prove the token of job {address.job!r}: it is not "
            "this job's rendezvous; take the address and the token from the same init_info"
        )
    lease_seconds = welcome.get("lease_seconds")
    if not isinstance(lease_seconds, int | float) or not lease_seconds > 0:
        raise RendezvousProtocolError(f"the welcome grants a lease of {lease_seconds!r} seconds")
    return float(lease_seconds)


async def admit_client(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    job: str,
    token: str,
    lease_seconds: float,
) -> None:
    """The server's half; raises what the client must be refused with."""
    hello = await read_frame(reader, MAX_HANDSHAKE_BYTES)
    if hello["kind"] == "hello" and hello.get("protocol") != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the client speaks version {hello.get('protocol')!r} of the rendezvous protocol, the "
            f"server version {PROTOCOL_VERSION}; upgrade rdt-transport on the older side"
        )
    wanted, theirs = _field(hello, "hello", "job"), _field(hello, "hello", "nonce")
    nonce = secrets.token_hex(_NONCE_BYTES)
    writer.write(encode_frame({"kind": "challenge", "nonce": nonce}))
    given = _field(await read_frame(reader, MAX_HANDSHAKE_BYTES), "proof", "proof")
    expected = _proof(token, "client", wanted, theirs, nonce)
    if not _equal(given, expected):
        raise TokenError(
            f"the token given is not that of the job served here; it was asked for job {wanted!r}; "
            "take the address and the token from the same init_info"
        )
    if wanted != job:
        raise RendezvousError(
            f"this rendezvous serves job {job!r}, not {wanted!r}; take the address and the job's "
            "name from the same init_info"
        )
    proof = _proof(token, "server", wanted, theirs, nonce)
    welcome = {"kind": "welcome", "proof": proof, "lease_seconds": lease_seconds}
    writer.write(encode_frame(welcome))
