"""The rdt weight-transfer backend of vLLM workers.

Importing this package imports neither vLLM nor torch: vLLM loads it in all of its processes.
"""

from rdt_vllm.errors import (
    AttachedElsewhereError,
    InitInfoError,
    InstallError,
    LifecycleError,
    RdtVllmError,
    ThreadTimeoutError,
    UnsupportedError,
    VllmVersionError,
    WorkerTornError,
)
from rdt_vllm.plugin import BACKEND, register

__all__ = [
    "BACKEND",
    "AttachedElsewhereError",
    "InitInfoError",
    "InstallError",
    "LifecycleError",
    "RdtVllmError",
    "ThreadTimeoutError",
    "UnsupportedError",
    "VllmVersionError",
    "WorkerTornError",
    "register",
]
