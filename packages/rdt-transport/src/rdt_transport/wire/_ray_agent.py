"""Ray's own NIXL agent: the one place that keeps its progress thread from spinning.

Ray makes an agent in every process that touches its NIXL transport, with NIXL's progress thread,
which polls without a pause on a core of its own for as long as the process lives. Made under
`rdt_transport.agent.sleeping_progress` that thread waits for events instead. Ray has no setting for
this, so the method that makes the agent is replaced.
"""

import functools
import logging
from importlib import import_module
from typing import Any

from rdt_transport.agent import sleeping_progress

__all__ = ["calm_agent", "forget_notifications"]

_logger = logging.getLogger(__name__)

_SPINS = "Ray's NIXL agent of this process keeps a core busy for as long as the process lives: %s"


def calm_agent() -> None:
    """Have Ray make its NIXL agent calm; says so in the log where it is too late. Idempotent."""
    kind: Any = import_module("ray.experimental.rdt.nixl_tensor_transport").NixlTensorTransport
    make = getattr(kind, "_make_nixl_agent", None)
    if make is None:
        _logger.warning(_SPINS, "this Ray makes it in another way than we know")
        return
    if hasattr(make, "__wrapped__"):
        return
    if _manager()._nixl_agent is not None:
        _logger.warning(_SPINS, "it was made before the first ray wire")

    @functools.wraps(make)
    def make_calm(transport: Any, backend: str) -> Any:
        with sleeping_progress():
            return make(transport, backend)

    kind._make_nixl_agent = make_calm


def forget_notifications() -> None:
    """Drop what Ray's readers leave in this process's agent, a few bytes a read, which Ray never
    takes. Only with the agent to oneself."""
    _manager().get_nixl_agent().get_new_notifs()


def _manager() -> Any:
    return import_module("ray.experimental.rdt.util").get_tensor_transport_manager("NIXL")
