"""Where a job's rendezvous is, and the secret that lets a process take part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rdt_transport.errors import RendezvousError

__all__ = ["RendezvousAddress"]


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Address of one job's rendezvous; travels to the workers in ``init_info``.

    Attributes:
        host: name or address that workers can reach.
        port: TCP port.
        job: the job's name; one rendezvous serves one job.
        token: shared secret, proved by challenge and never sent to the rendezvous. Not in the repr.
    """

    host: str
    port: int
    job: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("host", "job", "token"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                shown = "that" if name == "token" else repr(value)
                raise RendezvousError(f"a rendezvous needs a non-empty {name}, not {shown}")
        if isinstance(self.port, bool) or not isinstance(self.port, int):
            raise RendezvousError(f"the rendezvous port must be an integer, not {self.port!r}")
        if not 0 < self.port < 65536:
            raise RendezvousError(f"the rendezvous port must be in 1..65535, not {self.port}")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def init_info(self) -> dict[str, str]:
        """The fields ``address``, ``job`` and ``token`` of a worker's ``init_info``."""
        return {"address": str(self), "job": self.job, "token": self.token}

    @classmethod
    def from_init_info(cls, info: Mapping[str, Any]) -> "RendezvousAddress":
        """Read them back; other fields are ignored. Raises `RendezvousError` naming the field."""
        missing = [name for name in ("address", "job", "token") if name not in info]
        if missing:
            raise RendezvousError(
                f"init_info lacks {', '.join(missing)}; it comes from the trainer"
            )
        address = info["address"]
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isascii() or not port.isdigit():
            raise RendezvousError(f"init_info address must be 'host:port', not {address!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port), info["job"], info["token"])
