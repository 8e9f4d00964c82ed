"""Where the parties of a job meet: once per sync or less, over TCP, in a schema of our own."""

from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.client import RendezvousClient
from rdt_transport.rendezvous.events import (
    ConnectionLost,
    ConsumerDropped,
    ConsumerLeft,
    EpochFailed,
    ProducerLost,
    RendezvousEvent,
    SessionChanged,
    Subscribed,
)
from rdt_transport.rendezvous.local_host import LocalHost, RendezvousHost, host_local
from rdt_transport.rendezvous.outcome import DroppedReplica, EpochOutcome
from rdt_transport.rendezvous.ray_host import RayHost, host_in_ray, import_ray
from rdt_transport.rendezvous.settings import JobSettings

__all__ = [
    "ConnectionLost",
    "ConsumerDropped",
    "ConsumerLeft",
    "DroppedReplica",
    "EpochFailed",
    "EpochOutcome",
    "JobSettings",
    "LocalHost",
    "ProducerLost",
    "RayHost",
    "RendezvousAddress",
    "RendezvousClient",
    "RendezvousEvent",
    "RendezvousHost",
    "SessionChanged",
    "Subscribed",
    "host_in_ray",
    "host_local",
    "import_ray",
]
