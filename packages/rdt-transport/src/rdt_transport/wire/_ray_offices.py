"""Opening an office, finding a peer's, closing one's own."""

import logging
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from rdt_transport.errors import PeerLostError, WireError
from rdt_transport.wire import _ray_office
from rdt_transport.wire._metadata import name_proof
from rdt_transport.wire._ray_cluster import NAMESPACE
from rdt_transport.wire._ray_direct import READ_SECONDS, RayDirect

__all__ = ["close_office", "find_office", "open_office"]

_logger = logging.getLogger(__name__)

_START_SECONDS = 60.0  # Ray starts a process for it
_CLOSE_SECONDS = 5.0
_MAX_CALLS = 100_000  # at once: each reader has one that waits, and Ray's own limit is a thousand


def open_office(ray: Any, wire_name: str, proof: Any) -> Any:
    """The handle of a new office on this node, named like its wire; it dies with this process."""
    ray.cloudpickle.register_pickle_by_value(_ray_office)
    affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = affinity(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": wire_name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_concurrency": _MAX_CALLS,
    }
    office = (
        ray.remote(_ray_office.Office).options(**options, scheduling_strategy=here).remote([proof])
    )
    try:
        ray.get(office.proof.remote(), timeout=_START_SECONDS)
    except Exception as error:
        raise WireError(
            f"the office of {wire_name} did not come up within {_START_SECONDS:g} s: "
            f"{type(error).__name__}: {error}; look at the actor's log in Ray"
        ) from error
    return office


def find_office(ray: Any, direct: RayDirect, peer_name: str, landing: torch.Tensor) -> Any:
    """The handle of a peer's office, once its proof was read into ``landing``; blocks.

    Raises `PeerLostError` when there is none, `WireError` when the proof is another.
    """
    try:
        office = ray.get_actor(peer_name, namespace=NAMESPACE)
        (envelope,) = ray.get(office.proof.remote(), timeout=READ_SECONDS)
    except Exception as error:  # ValueError without one or from a closed one, RayError at its end
        raise PeerLostError(
            f"{peer_name} has no office in this Ray cluster: its process is gone, or is in another "
            f"cluster ({type(error).__name__})"
        ) from error
    try:
        ref = direct.open(envelope, [landing])
        direct.read(ref, [landing])
    except WireError as error:
        raise type(error)(f"{peer_name} cannot be read: {error}") from error
    if bytes(landing.tolist()) != name_proof(peer_name):
        raise WireError(f"reading from {peer_name} reached other memory")
    return office


def close_office(ray: Any, office: Any) -> None:
    """Have it refuse everything, then end it."""
    with suppress(Exception):  # it is gone already, or is ended now
        ray.get(office.close.remote(), timeout=_CLOSE_SECONDS)
    with suppress(Exception):
        ray.kill(office)
