"""The other ends of a rendezvous connection, for tests: broken, frozen, false, or listening."""

import hashlib
import hmac
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from rdt_transport.rendezvous import JobSettings, LocalHost, RendezvousAddress, host_local
from rdt_transport.rendezvous import requests as ask
from rdt_transport.rendezvous.messages import encode_message
from rdt_transport.rendezvous.protocol import PROTOCOL_VERSION

__all__ = [
    "JOB",
    "TOKEN",
    "WAIT_SECONDS",
    "Events",
    "Peer",
    "Relay",
    "false_server",
    "make_host",
    "proof",
]

JOB, TOKEN = "job", "a very secret token"
WAIT_SECONDS = 20.0


def make_host(num_producers: int = 1, lease_seconds: float = 30.0) -> LocalHost:
    """A rendezvous of two replicas in this process; the caller closes it."""
    return host_local(JOB, TOKEN, JobSettings(num_producers, 2, lease_seconds=lease_seconds))


def proof(role: str, client_nonce: str, server_nonce: str, token: str = TOKEN) -> str:
    said = json.dumps(["rdt-rendezvous", PROTOCOL_VERSION, role, JOB, client_nonce, server_nonce])
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


class Peer:
    """One end of a connection, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(WAIT_SECONDS)
        self.received = b""

    def send(self, frame: Any) -> None:
        body = json.dumps(frame).encode()
        self.sock.sendall(struct.pack(">I", len(body)) + body)

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self.sock.recv(num_bytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        self.received += data
        return data

    def receive(self) -> Any:
        (num_bytes,) = struct.unpack(">I", self.read(4))
        return json.loads(self.read(num_bytes))

    def is_closed(self) -> bool:
        """True when the other end says nothing more and has closed."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def prove(self) -> None:
        """A client's handshake."""
        self.send({"kind": "hello", "protocol": PROTOCOL_VERSION, "job": JOB, "nonce": "ab"})
        nonce = self.receive()["nonce"]
        self.send({"kind": "proof", "proof": proof("client", "ab", nonce)})
        welcome = self.receive()
        assert welcome["kind"] == "welcome"
        assert welcome["proof"] == proof("server", "ab", nonce)

    def call(self, request: ask.Request, call: int = 1) -> Any:
        body = encode_message(request)
        self.send({"kind": "call", "call": call, "timeout_seconds": 5.0, "request": body})
        return self.receive()


def false_server(speak: Callable[[Peer], None]) -> RendezvousAddress:
    """Serve one connection by ``speak``, then close it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(WAIT_SECONDS)

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            try:
                speak(Peer(sock))
            except (EOFError, OSError):
                pass

    threading.Thread(target=serve, daemon=True).start()
    return RendezvousAddress("127.0.0.1", listener.getsockname()[1], JOB, TOKEN)


class Relay:
    """Forwards a client's connection until it is frozen (both ends stay open) or cut."""

    def __init__(self, target: RendezvousAddress) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_SECONDS)
        port = self._listener.getsockname()[1]
        self.address = RendezvousAddress("127.0.0.1", port, target.job, target.token)
        self._thawed = threading.Event()
        self._thawed.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, args=(target,))]
        self._threads[0].start()

    def _accept(self, target: RendezvousAddress) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection((target.host, target.port))
        self._sockets += [near, far]
        for pair in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._pump, args=pair))
            self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._thawed.wait()
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def freeze(self) -> None:
        self._thawed.clear()

    def close(self) -> None:
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._thawed.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        for sock in (*self._sockets, self._listener):
            sock.close()


class Events:
    """A listener that hands events to the test's thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, event: Any) -> None:
        self.queue.put(event)

    def next(self, kind: type) -> Any:
        event = self.queue.get(timeout=WAIT_SECONDS)
        assert isinstance(event, kind), event
        return event
