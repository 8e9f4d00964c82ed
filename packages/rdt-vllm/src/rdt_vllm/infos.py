"""What the trainer tells a worker: once to attach it, and with every sync."""

from dataclasses import dataclass

from rdt_vllm import _vllm

__all__ = ["RdtInitInfo", "RdtUpdateInfo"]


@dataclass
class RdtInitInfo(_vllm.WeightTransferInitInfo):
    """What the trainer tells every worker once.

    Attributes:
        address: ``host:port`` of the job's rendezvous.
        job: the job's name.
        token: its secret.
        replica: number of this deployment, from 0.
        num_replicas: deployments of the job.
        num_workers: workers of this deployment; 0 infers it (see `worker_identity`).
        timeout_seconds: deadline of each wait of this worker.
    """

    address: str
    job: str
    token: str
    replica: int = 0
    num_replicas: int = 1
    num_workers: int = 0
    timeout_seconds: float = 120.0


@dataclass
class RdtUpdateInfo(_vllm.WeightTransferUpdateInfo):
    """Which epoch of which session to pull."""

    session: str
    epoch: int
