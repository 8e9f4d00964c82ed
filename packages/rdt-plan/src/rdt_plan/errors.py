"""Every error of this package, under one root that users can catch."""

__all__ = [
    "LayoutError",
    "ManifestError",
    "OwnershipError",
    "PeerProtocolError",
    "PlanError",
    "ProtocolError",
    "RdtPlanError",
    "RoutingError",
    "SliceError",
    "WireFormatError",
]


class RdtPlanError(Exception):
    """Root of the errors of ``rdt_plan``."""


class ManifestError(RdtPlanError):
    """The description of a model is inconsistent: names, dtypes, shapes, groups."""


class OwnershipError(RdtPlanError):
    """A name is held by nobody, by a rank that does not exist, or in a way we cannot express."""


class RoutingError(RdtPlanError):
    """No producer can serve a consumer's slice."""


class SliceError(RdtPlanError):
    """A strided region is malformed or leaves its tensor."""


class LayoutError(RdtPlanError):
    """Packed bytes do not fit the layout both sides computed."""


class PlanError(RdtPlanError):
    """A plan cannot be built, or its parts contradict each other."""


class WireFormatError(RdtPlanError):
    """A message is too large, of another version, or not of our schema."""


class ProtocolError(RdtPlanError):
    """We broke the protocol: an event that is illegal in the present state."""


class PeerProtocolError(RdtPlanError):
    """A peer broke the protocol."""
