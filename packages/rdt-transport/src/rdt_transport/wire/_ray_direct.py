"""Ray Direct Transport as the ray wire uses it: an object for each prepared read, read repeatedly.

An object's tensors are views of registered memory, and Ray reads what lies there when it is asked.
It reads objects whole, so there is one for each set of regions. Its NIXL agent is not thread-safe
and there is one a process, so whatever uses it here does so in turn.
"""

import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from rdt_transport.errors import WireError, WireTimeoutError
from rdt_transport.events import events_of
from rdt_transport.wire._ray_agent import calm_agent, forget_notifications

__all__ = ["READ_SECONDS", "RayDirect", "Shared"]

READ_SECONDS = 60.0
"""A read that takes longer has failed; Ray gives none more unless told to."""

_NIXL = "NIXL"
_agent = threading.Lock()
_PAUSE_SECONDS = 0.0002

Shared = tuple[Any, Any]
"""An object's ref, and an envelope: the ref of a plain object that holds it. Whoever passes the
envelope on need not know tensors."""


class RayDirect:
    """Puts and gets objects of one tensor transport; any thread.

    Args:
        ray: the module, of an attached process.
        transport: Ray's name of it: one-sided, "NIXL" or another that is registered.
    """

    def __init__(self, ray: Any, transport: str) -> None:
        self.transport = transport.upper()
        self._ray = ray
        self._api: Any = import_module("ray.experimental")
        self._lands_in_targets = self.transport == _NIXL
        if self.transport == _NIXL:
            calm_agent()

    def pin(self, buffer: torch.Tensor) -> None:
        """Register its storage until `unpin`: else Ray does so for each object and each get, and
        every deregistration makes all readers of this process connect again."""
        if self.transport == _NIXL:
            with _agent, _Translated(f"registering {buffer.nbytes} bytes"):
                self._api.register_nixl_memory(buffer)

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo one `pin`."""
        if self.transport == _NIXL:
            with _agent, _Translated("deregistering memory"):
                self._api.deregister_nixl_memory(buffer)

    def share(self, views: Sequence[torch.Tensor]) -> Shared:
        """An object of these; readable until all refs are gone."""
        with _agent, _Translated(f"sharing {len(views)} regions"):
            ref = self._ray.put(list(views), _tensor_transport=self.transport)
        return ref, self._ray.put([ref])

    def open(self, envelope: Any, targets: Sequence[torch.Tensor]) -> Any:
        """The ref in an envelope, whose tensors are to land in ``targets``.

        Ray keeps weak references to these: the caller holds them for as long as it reads.
        """
        with _Translated("asking for an object's ref"):
            (ref,) = self._ray.get(envelope, timeout=READ_SECONDS)
            if self._lands_in_targets:
                self._api.set_target_for_ref(ref, list(targets))
        return ref

    def read(self, ref: Any, targets: Sequence[torch.Tensor]) -> None:
        """Have what lies in the object's memory now in ``targets``; blocks.

        Raises `WireTimeoutError`, after which bytes may still land, and `WireError`.
        """
        with _agent, _Translated("reading an object"):
            landed = self._ray.get(ref, timeout=READ_SECONDS)
        strays = [
            (target, found)
            for target, found in zip(targets, landed, strict=True)
            if target.data_ptr() != found.data_ptr()  # of this process, or without targets
        ]
        for target, found in strays:
            target.copy_(found)
        if strays:
            landing = events_of(strays[0][0].device).record()
            while not landing.query():
                time.sleep(_PAUSE_SECONDS)

    def forget_notifications(self) -> None:
        """See `rdt_transport.wire._ray_agent.forget_notifications`."""
        if self.transport == _NIXL:
            with _agent, _Translated("dropping notifications"):
                forget_notifications()


class _Translated:
    """Raises whatever Ray raises as ours, by its last line: the others are a trace."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: object) -> None:
        if isinstance(error, Exception):
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            ours = WireTimeoutError if isinstance(error, TimeoutError) else WireError
            raise ours(f"{self._doing}: {type(error).__name__}: {lines[-1].strip()}") from error
