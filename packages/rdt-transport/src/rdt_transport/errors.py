"""Every error of this package, under one root that users can catch."""

__all__ = [
    "DisagreementError",
    "EpochFailedError",
    "NixlMissingError",
    "PeerLostError",
    "RayMissingError",
    "RdtTransportError",
    "RendezvousError",
    "RendezvousLostError",
    "RendezvousProtocolError",
    "RendezvousTimeoutError",
    "SyncAbortedError",
    "SyncTimeoutError",
    "TokenError",
    "TornError",
    "VersionMismatchError",
    "WireError",
    "WireTimeoutError",
]


class RdtTransportError(Exception):
    """Root of the errors of ``rdt_transport``."""


class WireError(RdtTransportError):
    """A wire refused or failed an operation; the message names the peer where there is one."""


class WireTimeoutError(WireError):
    """A wire operation did not end within its deadline."""


class PeerLostError(WireError):
    """A connected peer is gone: its process died or its connection broke."""


class NixlMissingError(WireError):
    """NIXL is not installed, or not in a version this package can use."""


class RendezvousError(RdtTransportError):
    """The rendezvous of a job refused a request or cannot be reached."""


class TokenError(RendezvousError):
    """The job's token was not proved."""


class VersionMismatchError(RendezvousError):
    """Two parties speak different wire versions."""


class DisagreementError(RendezvousError):
    """Two parties of one job describe it differently."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """A call of the rendezvous did not end within its deadline; the message says who is missing."""


class RendezvousLostError(RendezvousError):
    """The connection to the rendezvous is gone; the client must be made anew."""


class RendezvousProtocolError(RendezvousError):
    """The other end of a rendezvous connection sent what our schema does not allow."""


class EpochFailedError(RendezvousError):
    """The epoch asked for was given up; the message says which and why."""


class RayMissingError(RendezvousError):
    """Ray is needed, and not installed, too old, or not initialised."""


class SyncTimeoutError(RdtTransportError):
    """A sync did not end within its deadline; the message names what it waited for."""


class SyncAbortedError(RdtTransportError):
    """A sync was given up, here or by a peer.

    Attributes:
        reason: what the party that gave up said.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TornError(RdtTransportError):
    """A worker holds a mixture of old and new weights; a complete sync heals it."""
