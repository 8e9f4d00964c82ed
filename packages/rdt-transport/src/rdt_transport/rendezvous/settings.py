"""What a whole job agrees on: set once, by whoever hosts the rendezvous."""

from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from rdt_transport.errors import RendezvousError

__all__ = ["JobSettings"]

# By the kind of memory that rank 0 serves from. A chunk costs a GPU as much time as 200 MB of bytes
# do, and a CPU next to nothing; why these: docs/decisions/0010 and 0024.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings that must be equal for every party of one job.

    Attributes:
        num_producers: trainer ranks that publish weights.
        num_replicas: inference deployments that the job starts with: replicas 0 to
            ``num_replicas - 1``. Later ones join, and leave, by `RendezvousClient.set_replicas`.
        num_slots: slots of every ring, on both sides.
        max_chunk_bytes: cap of one chunk, hence of one slot. None leaves it to whoever hosts the
            rendezvous, hence to `for_device`.
        lookahead: groups a producer may gather ahead of the one being read.
        lease_seconds: how long a silent client counts as alive. Longer than the longest stall of
            a worker (a garbage collection, a compilation), or healthy replicas are dropped.
    """

    num_producers: int
    num_replicas: int = 1
    num_slots: int = 2
    max_chunk_bytes: int | None = None
    lookahead: int = 1
    lease_seconds: float = 15.0

    def __post_init__(self) -> None:
        least = {"lookahead": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_chunk_bytes":
                continue
            if field.name == "lease_seconds":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise RendezvousError(f"lease_seconds must be a number, not {value!r}")
                if not (isfinite(value) and value > 0):
                    raise RendezvousError(f"lease_seconds must be positive, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int):
                raise RendezvousError(f"{field.name} must be an integer, not {value!r}")
            elif value < least.get(field.name, 1):
                raise RendezvousError(
                    f"{field.name} must be at least {least.get(field.name, 1)}, not {value}"
                )

    @property
    def chunk_bytes(self) -> int:
        """`max_chunk_bytes`; where that is left open, what suits host memory: 64 MiB."""
        return self.max_chunk_bytes or _CHUNK_BYTES["cpu"]

    def for_device(self, kind: str) -> "JobSettings":
        """With what suits the memory that the job's trainer serves from, where it is left open.

        That is 64 MiB of host memory ("cpu"), and 1 GiB of a GPU's ("cuda").
        """
        if self.max_chunk_bytes is not None:
            return self
        return replace(self, max_chunk_bytes=_CHUNK_BYTES.get(kind, self.chunk_bytes))

    def to_json(self) -> dict[str, Any]:
        """The settings as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "JobSettings":
        """The settings in ``value``; raises `RendezvousError` for missing or unknown fields."""
        try:
            return cls(**value)
        except TypeError as error:
            raise RendezvousError(f"job settings {value!r} are not ours: {error}") from error
