"""Move planned weight chunks between processes over one-sided reads.

`Producer` and `Consumer` are the two ends of a sync; a `ProgressThread` owns the wire of each, and
they meet at a rendezvous. Importing this package imports torch, and neither NIXL nor Ray.
"""

from rdt_transport.consumer import Consumer
from rdt_transport.errors import RdtTransportError
from rdt_transport.events import CudaEvents, Event, Events, HostEvents, events_of
from rdt_transport.intervals import Interval, Intervals
from rdt_transport.memory import Arena
from rdt_transport.producer import Producer
from rdt_transport.progress import Endpoint, ProgressThread
from rdt_transport.pulling import SyncStats
from rdt_transport.rendezvous import (
    JobSettings,
    RendezvousAddress,
    RendezvousClient,
    host_local,
)
from rdt_transport.wire.base import Wire

__all__ = [
    "Arena",
    "Consumer",
    "CudaEvents",
    "Endpoint",
    "Event",
    "Events",
    "HostEvents",
    "Interval",
    "Intervals",
    "JobSettings",
    "Producer",
    "ProgressThread",
    "RdtTransportError",
    "RendezvousAddress",
    "RendezvousClient",
    "SyncStats",
    "Wire",
    "events_of",
    "host_local",
]
