"""What the trainer tells a worker: once to attach it, and with every sync."""

from dataclasses import dataclass, field
from typing import Any

from rdt_plan import ConsumerId
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
        num_replicas: deployments of the job.
        num_workers: workers of this deployment; 0 infers it (see `worker_identity`).
        timeout_seconds: deadline of each wait of this worker.
        live: write where kernels read, in modules whose post-processing changes nothing; off:
            every module is installed layerwise.
        direct: read from the trainer's own memory into such modules, where both allow it; off:
            everything passes through slots.

    Raises:
        InitInfoError: ``timeout_seconds`` is not positive.
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

    def __post_init__(self) -> None:
        if not self.timeout_seconds > 0:
            raise InitInfoError(
                f"timeout_seconds must be positive, found {self.timeout_seconds}: give the seconds "
                "that one wait of a worker may take, 120 say"
            )

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
    """Which epoch of which session to pull."""

    session: str
    epoch: int
