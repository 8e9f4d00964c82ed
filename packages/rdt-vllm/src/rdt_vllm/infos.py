"""What the trainer tells a worker: once to attach it, and with every sync."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rdt_plan import ConsumerId, EpochRecord, WireFormatError
from rdt_transport.agent import posting_threads
from rdt_transport.errors import WireError
from rdt_transport.wire.base import Wire
from rdt_transport.wire.choice import WireChoice
from rdt_vllm import _vllm
from rdt_vllm.errors import InitInfoError
from rdt_vllm.identity import worker_identity

__all__ = ["RdtInitInfo", "RdtUpdateInfo"]


@dataclass
class RdtInitInfo(_vllm.WeightTransferInitInfo):
    """What the trainer tells every worker once.

    Attributes:
        address: ``host:port`` of the job's rendezvous.
        job: the job's name.
        token: its secret; not in the repr.
        replica: number of this deployment, from 0.
        num_replicas: one more than the highest number that the job has given a deployment.
        num_workers: workers of this deployment; 0 infers it (see `worker_identity`).
        timeout_seconds: deadline of each wait of this worker.
        live: write where kernels read, in modules whose post-processing changes nothing; off:
            every module is installed layerwise.
        direct: read from the trainer's own memory into such modules, where both allow it; off:
            everything passes through slots.
        read_threads: that post reads of many regions together; None: as many as suit the device
            (`rdt_transport.agent.posting_threads`), 0: the progress thread posts everything.
        unconsumed: patterns (as a shell's) of names that this worker need not read: where its
            loaders refuse what the trainer serves, they are not shown these.
        wire: "nixl", or "ray" or "ray:" and a tensor transport of Ray's: see `WireChoice`.
        ray_address: that cluster's, where the worker is not attached to one; "auto": this node's.

    Raises:
        InitInfoError: ``timeout_seconds`` is not positive, ``read_threads`` is negative, or there
            is no such wire.
    """

    address: str
    job: str
    token: str = field(repr=False)
    replica: int = 0
    num_replicas: int = 1
    num_workers: int = 0
    timeout_seconds: float = 120.0
    live: bool = True
    direct: bool = True
    read_threads: int | None = None
    unconsumed: Sequence[str] = ()
    wire: str = "nixl"
    ray_address: str = "auto"

    def __post_init__(self) -> None:
        try:
            WireChoice.parse(self.wire)
        except WireError as error:
            raise InitInfoError(f"the field wire: {error}") from error
        if not self.timeout_seconds > 0:
            raise InitInfoError(
                f"timeout_seconds must be positive, found {self.timeout_seconds}: give the seconds "
                "that one wait of a worker may take, 120 say"
            )

        if self.read_threads is not None and self.read_threads < 0:
            raise InitInfoError(
                f"read_threads must not be negative, found {self.read_threads}: leave it out, or "
                "give 0 to post every read from one thread"
            )

    def num_read_threads(self, device_type: str) -> int:
        """Threads that post the reads of a worker whose model is on this type of device."""
        return posting_threads(device_type) if self.read_threads is None else self.read_threads

    def make_wire(self, name: str, device_type: str) -> Wire:
        """The worker's wire, for reading; on the thread that is to own it."""
        num_threads = self.num_read_threads(device_type)
        chosen = WireChoice.parse(self.wire)
        return chosen.reading(name, num_threads=num_threads, ray_address=self.ray_address)

    def identity(self, parallel: Any) -> tuple[ConsumerId, int]:
        """`worker_identity` of the worker whose vLLM has this parallel configuration."""
        return worker_identity(
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.data_parallel_size,
            world_size=parallel.world_size,
            rank=parallel.rank,
            replica=self.replica,
            num_replicas=self.num_replicas,
            num_workers=self.num_workers,
        )


@dataclass
class RdtUpdateInfo(_vllm.WeightTransferUpdateInfo):
    """Which epoch of which session to pull: an `EpochRecord`, as JSON, and how.

    Attributes:
        session: the rendezvous's.
        epoch: its number.
        live: who takes part; None: the worker asks the rendezvous.
        checksums: verify what is pulled before it is committed: ``key``, hexadecimal, and
            ``workers``, by worker and by owner the checksums of each chunk, by seq
            (`rdt_transport.checksums`).
    """

    session: str
    epoch: int
    live: list[Any] | None = None
    checksums: dict[str, Any] | None = None

    @property
    def record(self) -> EpochRecord | None:
        """The epoch's record, if it is told; raises `InitInfoError` for one that is malformed."""
        if self.live is None:
            return None
        try:
            return EpochRecord.from_json(
                {"session": self.session, "epoch": self.epoch, "live": self.live}
            )
        except WireFormatError as error:
            raise InitInfoError(f"update_info is no epoch's record: {error}") from error
