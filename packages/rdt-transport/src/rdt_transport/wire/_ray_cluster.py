"""Attaching this process to a Ray cluster, once however many wires it has, and leaving it again."""

import logging
import threading
from typing import Any

from rdt_transport.errors import RayMissingError
from rdt_transport.rendezvous import import_ray

__all__ = ["NAMESPACE", "attach", "detach"]

_logger = logging.getLogger(__name__)

NAMESPACE = "rdt"
"""Ray namespace of the offices' names."""

_PURPOSE = "the ray wire"
_MINIMUM_VERSION = (2, 59)  # drivers put tensors from then on

_lock = threading.Lock()
_num_wires = 0
_attached_here = False


def attach(address: str | None) -> Any:
    """The module ``ray`` of a process that is attached; an attached one stays where it is.

    Args:
        address: of the cluster, or "auto" for the one of this node; None: this process must be
            attached already.

    Raises `RayMissingError` when Ray is absent, too old, or not initialised.
    """
    global _num_wires, _attached_here
    ray = import_ray(_PURPOSE, _MINIMUM_VERSION)
    with _lock:
        if not ray.is_initialized():
            if address is None:
                raise RayMissingError(
                    f"{_PURPOSE} needs a process that is attached to Ray: call ray.init() first"
                )
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
            except Exception as error:  # Ray's have no root of their own
                raise RayMissingError(
                    f"{_PURPOSE} cannot attach to the Ray cluster at {address!r}: {error}; is its "
                    "head there, and has this process its token (RAY_AUTH_MODE=token) if it "
                    "authenticates?"
                ) from error
            _attached_here = True
            _logger.warning(
                "attached to the Ray cluster at %s for the ray wire: Ray ends this process about "
                "60 s after the cluster's head dies",
                address,
            )
        _num_wires += 1
    return ray


def detach(ray: Any) -> None:
    """One wire ends; the last one leaves a cluster that the first one attached to."""
    global _num_wires, _attached_here
    with _lock:
        _num_wires -= 1
        if _num_wires == 0 and _attached_here:
            _attached_here = False
            ray.shutdown()
