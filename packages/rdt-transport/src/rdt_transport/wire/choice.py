"""Which wire a job uses: the trainer names it, and tells its workers."""

from dataclasses import dataclass
from typing import Any

from rdt_transport.errors import WireError
from rdt_transport.wire.base import Wire

__all__ = ["WireChoice"]

_NAMES = "'nixl', 'ray' or 'ray:' with the name of one of Ray's tensor transports"


@dataclass(frozen=True, slots=True)
class WireChoice:
    """The nixl wire, or the ray wire over one of Ray's tensor transports.

    Its methods import what they need, and raise what the wire's constructor raises.

    Attributes:
        name: as the user wrote it.
        transport: Ray's name; empty for the nixl wire.
    """

    name: str = "nixl"
    transport: str = ""

    @classmethod
    def parse(cls, name: str) -> "WireChoice":
        """Raises `WireError` for a name that is no wire's."""
        kind, colon, transport = name.partition(":")
        if name == "nixl":
            return cls(name)
        if kind == "ray" and bool(colon) == bool(transport):
            return cls(name, transport or "NIXL")
        raise WireError(f"there is no wire {name!r}: expected {_NAMES}")

    def serving(self, role: str) -> Wire:
        """What a trainer rank serves over; over Ray in a process that is attached to a cluster."""
        if self.transport:
            from rdt_transport.wire.ray import RayWire

            return RayWire(role, transport=self.transport)
        from rdt_transport.wire.nixl import NixlWire

        return NixlWire(role)

    def reading(self, role: str, *, num_threads: int, ray_address: str) -> Wire:
        """What a worker reads over.

        Args:
            num_threads: that post reads over the nixl wire.
            ray_address: of the cluster to attach to for the ray wire, if the process is not.
        """
        if self.transport:
            from rdt_transport.wire.ray import RayWire

            return RayWire(role, serves=False, transport=self.transport, address=ray_address)
        from rdt_transport.wire.nixl import NixlWire

        return NixlWire(role, num_threads=num_threads)

    def init_info(self) -> dict[str, Any]:
        """What workers are told: ``wire``, and for Ray ``ray_address``, this process's cluster."""
        if self.transport:
            from rdt_transport.rendezvous import import_ray

            address = import_ray("the ray wire").get_runtime_context().gcs_address
            return {"wire": self.name, "ray_address": address}
        return {"wire": self.name}
