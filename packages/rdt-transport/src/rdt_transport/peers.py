"""The peers of one wire, counted by the sessions that use them."""

import contextlib
from collections import Counter

from rdt_transport.errors import WireError
from rdt_transport.wire.base import PeerAddress, Wire

__all__ = ["Peers"]


class Peers:
    """A peer met by several sessions of one wire is left with the last of them.

    Only on the progress thread of that wire.
    """

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def meet(self, wire: Wire, peer: PeerAddress, timeout_seconds: float) -> None:
        """Connect, and count one use; raises what `Wire.connect` raises, and counts nothing."""
        wire.connect(peer, timeout_seconds)
        self._uses[peer.name] += 1

    def leave(self, wire: Wire, name: str) -> None:
        """One use ends; the last one disconnects."""
        self._uses[name] -= 1
        if self._uses[name] <= 0:
            del self._uses[name]
            wire.disconnect(name)

    def give_up(self, wire: Wire, name: str) -> None:
        """Forget a peer that was not met, as far as the wire knows it; one in use stays."""
        if not self._uses[name]:
            with contextlib.suppress(WireError):  # a failed connect may have forgotten it
                wire.disconnect(name)
