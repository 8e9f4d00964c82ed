"""The doorbell: the fixed-size message that rides on the wire's notifications.

Every doorbell is `NUM_BYTES` bytes, little-endian, without padding between fields:

====== ===== ======== =========================================
offset bytes field    meaning
====== ===== ======== =========================================
0      4     magic    ``b"rdtD"``
4      1     version  `VERSION`
5      1     kind     `Kind`
6      2     reserved 0
8      4     seq      position in the stream between one pair
12     4     epoch    number of the sync within its session
16     16    session  the rendezvous's session
32     16    sender   incarnation that sent it
48     16    receiver incarnation it is for
====== ===== ======== =========================================
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from rdt_plan.errors import PeerProtocolError, ProtocolError

__all__ = ["ID_BYTES", "MAGIC", "NUM_BYTES", "VERSION", "Doorbell", "Kind"]

MAGIC = b"rdtD"
VERSION = 1
ID_BYTES = 16
_LAYOUT = Struct("<4sBBHII16s16s16s")
NUM_BYTES = _LAYOUT.size
_MAX_U32 = 2**32 - 1


class Kind(IntEnum):
    """What a doorbell says."""

    READY = 1  #: producer to consumer: chunk ``seq`` is readable, in its slot or directly.
    DONE = 2  #: consumer to producer: chunk ``seq`` has been read, nobody needs its bytes.


@dataclass(frozen=True, slots=True)
class Doorbell:
    """One message between a producer and a consumer incarnation.

    ``session``, ``sender`` and ``receiver`` are `ID_BYTES` bytes each; ``epoch`` and ``seq`` are
    unsigned 32-bit. Raises `ProtocolError` when a field does not fit.
    """

    session: bytes
    epoch: int
    sender: bytes
    receiver: bytes
    kind: Kind
    seq: int

    def __post_init__(self) -> None:
        for field in ("session", "sender", "receiver"):
            value = getattr(self, field)
            if type(value) is not bytes or len(value) != ID_BYTES:
                raise ProtocolError(f"doorbell {field}: expected {ID_BYTES} bytes, found {value!r}")
        for field in ("epoch", "seq"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= _MAX_U32:
                raise ProtocolError(f"doorbell {field}: expected 0..{_MAX_U32}, found {value!r}")
        if not isinstance(self.kind, Kind):
            raise ProtocolError(f"doorbell kind: expected a Kind, found {self.kind!r}")

    def encode(self) -> bytes:
        """The `NUM_BYTES` bytes of this doorbell."""
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.kind,
            0,
            self.seq,
            self.epoch,
            self.session,
            self.sender,
            self.receiver,
        )

    @classmethod
    def decode(cls, message: bytes) -> "Doorbell":
        """The doorbell in ``message``; raises `PeerProtocolError` when there is none."""
        if len(message) != NUM_BYTES:
            raise PeerProtocolError(f"doorbell: expected {NUM_BYTES} bytes, found {len(message)}")
        magic, version, kind, reserved, seq, epoch, *ids = _LAYOUT.unpack(message)
        if magic != MAGIC:
            raise PeerProtocolError(f"doorbell: expected magic {MAGIC!r}, found {magic!r}")
        if version != VERSION:
            raise PeerProtocolError(
                f"doorbell: expected version {VERSION}, found {version}; "
                "install the same release of rdt-plan on both sides"
            )
        if reserved != 0:
            raise PeerProtocolError(f"doorbell: expected reserved 0, found {reserved}")
        try:
            kind = Kind(kind)
        except ValueError:
            raise PeerProtocolError(f"doorbell: unknown kind {kind}") from None
        session, sender, receiver = ids
        return cls(session, epoch, sender, receiver, kind, seq)
