"""The rendezvous in a named Ray actor: Ray supervises it, and any process of the job finds it.

Only the host needs Ray. Workers reach the service over TCP, with an address from ``init_info``.
"""

import uuid
from importlib import import_module
from typing import Any

from rdt_transport.errors import DisagreementError, RayMissingError, RendezvousError
from rdt_transport.rendezvous.address import RendezvousAddress
from rdt_transport.rendezvous.local_host import LocalHost
from rdt_transport.rendezvous.settings import JobSettings

__all__ = ["RayHost", "host_in_ray", "import_ray"]

_NAMESPACE = "rdt"
_TIMEOUT_SECONDS = 60.0  # Ray starts a process for the actor
_MINIMUM_VERSION = (2, 56)
_REMEDY = "install it with: pip install 'rdt-transport[ray]'"


class RendezvousActor:
    """Runs in the actor's process: a server thread, so that the actor stays free to answer."""

    def __init__(self, job: str, token: str, settings: dict[str, Any], creator: str) -> None:
        self._settings = settings
        self._creator = creator
        node = import_ray().util.get_node_ip_address()
        self._host = LocalHost(job, token, JobSettings.from_json(settings), host=node)

    def locate(self) -> tuple[str, int, dict[str, Any], str]:
        """Host, port, the settings it serves, and who created it."""
        return self._host.address.host, self._host.address.port, self._settings, self._creator

    def close(self) -> None:
        """Close every connection, so that clients need not wait for the process's end."""
        self._host.close()


class RayHost:
    """The job's rendezvous actor. Whoever created it ends it by `close`; others only let go."""

    def __init__(self, address: RendezvousAddress, actor: Any, *, owned: bool, stop_ray: bool):
        self.address = address
        self._actor = actor
        self._owned = owned
        self._stop_ray = stop_ray

    def close(self) -> None:
        """End the job, if this is the host that created the actor. Idempotent."""
        actor, self._actor = self._actor, None
        ray = import_ray()
        if actor is None or not ray.is_initialized():
            return
        if self._owned:
            try:
                ray.get(actor.close.remote(), timeout=_TIMEOUT_SECONDS)
            except ray.exceptions.RayError:
                pass  # it is gone already, or is killed now
            ray.kill(actor)
        if self._stop_ray:
            ray.shutdown()


def host_in_ray(
    job: str,
    token: str,
    settings: JobSettings,
    *,
    namespace: str = _NAMESPACE,
    ray_address: str | None = None,
) -> RayHost:
    """Serve the job's rendezvous from the actor ``rdt-rendezvous-<job>``, or find it again.

    Every rank may call this with the same arguments: one creates the actor, all get its address.
    The actor lives as long as the driver that created it, takes no CPU from Ray's books, listens on
    its node's address, and is not restarted: its clients see their connections close instead.

    Args:
        job: the job's name.
        token: the job's secret; it reaches the actor through Ray.
        settings: what the whole job agrees on.
        namespace: Ray namespace of the actor's name.
        ray_address: None or ``"auto"`` use the Ray that this process has initialised; ``"local"``
            starts one, which `RayHost.close` stops; anything else is a cluster to connect to.

    Raises `RayMissingError` when Ray is not there or too old, `DisagreementError` when the actor
    that is found serves other settings, `RendezvousError` when the actor does not come up.
    """
    ray = import_ray()
    started = _initialise(ray, ray_address)
    creator = uuid.uuid4().hex
    try:
        actor = (
            ray.remote(RendezvousActor)
            .options(name=_actor_name(job), namespace=namespace, get_if_exists=True, num_cpus=0)
            .remote(job, token, settings.to_json(), creator)
        )
        host, port, theirs, made_by = _locate(ray, actor, job)
        if JobSettings.from_json(theirs) != settings:
            raise DisagreementError(
                f"the rendezvous of job {job!r} runs with {theirs}, not with {settings.to_json()}; "
                "give all ranks the same settings, or another job name"
            )
    except BaseException:
        if started:
            ray.shutdown()
        raise
    address = RendezvousAddress(host, port, job, token)
    return RayHost(address, actor, owned=made_by == creator, stop_ray=started)


def _actor_name(job: str) -> str:
    return f"rdt-rendezvous-{job}"


def _locate(ray: Any, actor: Any, job: str) -> tuple[str, int, dict[str, Any], str]:
    try:
        return ray.get(actor.locate.remote(), timeout=_TIMEOUT_SECONDS)
    except ray.exceptions.RayError as error:
        raise RendezvousError(
            f"the rendezvous actor of job {job!r} did not come up within {_TIMEOUT_SECONDS:g} s: "
            f"{error}; look at the actor's log in Ray"
        ) from error


def import_ray(
    purpose: str = "hosting the rendezvous in Ray (host_local does without)",
    minimum: tuple[int, int] = _MINIMUM_VERSION,
) -> Any:
    """The module ``ray``; raises `RayMissingError` when it is absent or too old for ``purpose``."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise RayMissingError(f"{purpose} needs Ray: {error}; {_REMEDY}") from error
    numbers = tuple(int(part) for part in ray.__version__.split(".")[:2] if part.isdecimal())
    if numbers < minimum:
        raise RayMissingError(
            f"{purpose} needs Ray {'.'.join(map(str, minimum))} or newer, found "
            f"{ray.__version__}; {_REMEDY}"
        )
    return ray


def _initialise(ray: Any, ray_address: str | None) -> bool:
    """True when this call started a Ray of its own."""
    if ray.is_initialized():
        return False
    if ray_address is None or ray_address == "auto":
        raise RayMissingError(
            "Ray is not initialised in this process; call ray.init() first, or say which Ray: "
            "ray_address='local' starts one, an address connects to a cluster"
        )
    if ray_address == "local":
        ray.init(address="local", include_dashboard=False)
        return True
    ray.init(address=ray_address)
    return True
