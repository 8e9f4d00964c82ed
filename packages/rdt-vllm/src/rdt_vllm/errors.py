"""Every error of this package, under one root that users can catch."""

__all__ = [
    "AttachedElsewhereError",
    "InitInfoError",
    "InstallError",
    "LifecycleError",
    "ProbeError",
    "RdtVllmError",
    "ThreadTimeoutError",
    "UnsupportedError",
    "VerificationError",
    "VllmVersionError",
    "WorkerTornError",
]


class RdtVllmError(Exception):
    """Root of the errors of ``rdt_vllm``."""


class VllmVersionError(RdtVllmError):
    """The installed vLLM is too old, or lacks something we build on; the message names it."""


class UnsupportedError(RdtVllmError):
    """This engine's configuration or model cannot be synced correctly; says why and what to do."""


class InitInfoError(RdtVllmError):
    """A field of ``init_info`` or ``update_info`` is wrong, or contradicts this worker."""


class AttachedElsewhereError(RdtVllmError):
    """The worker is attached to another job whose rendezvous is alive."""


class LifecycleError(RdtVllmError):
    """A call came out of order: init, start, update, finish."""


class InstallError(RdtVllmError):
    """A module could not be installed; the original error is ``__cause__``."""

    @classmethod
    def of(cls, what: str, cause: BaseException) -> "InstallError":
        """``what`` failed, because of ``cause``."""
        error = cls(f"{what}: {cause}")
        error.__cause__ = cause
        return error


class ProbeError(RdtVllmError):
    """What a module's post-processing does cannot be found out; it is installed layerwise."""


class ThreadTimeoutError(RdtVllmError, TimeoutError):
    """A background thread did not get through its work in time; says which and what is left."""


class VerificationError(RdtVllmError):
    """What this worker got is not what was sent, by its checksums; names the slices."""


class WorkerTornError(RdtVllmError):
    """This worker may hold a mixture of old and new weights; a complete sync heals it."""
