"""What `send_weights` raises for the failure that ended a sync."""

from rdt_plan import SliceError
from rdt_trainer.errors import SourceError, SyncFailedError, TrainerStateError
from rdt_trainer.sync_state import Cause
from rdt_transport.errors import RendezvousLostError

__all__ = ["UNTOLD", "raised_by"]

UNTOLD = (
    "the rendezvous may not know of it yet: for as long as a lease, workers may go on reading "
    "stable tensors, and commit what they read; leave these unchanged until then"
)
"""A note on an error that ended a sync on this rank alone."""


def raised_by(
    cause: Cause, error: BaseException, *, rank: int, epoch: int, connected: bool
) -> BaseException:
    """The error itself, where it says all, or one that says what to do.

    Args:
        cause: what failed first.
        error: with this.
        rank: of this trainer.
        epoch: that failed.
        connected: the rendezvous was still there.
    """
    told = cause in (Cause.SOURCE_MISMATCH, Cause.INTERRUPT)
    if told or isinstance(error, TrainerStateError):
        return error
    if cause is Cause.SOURCE_RAISED:
        return SourceError(f"rank {rank}: the source raised {type(error).__name__}: {error}")
    if isinstance(error, SliceError):  # a stable tensor that is another one
        return SourceError(f"rank {rank}: {error}")
    remedy = "call send_weights() again once the cause is gone"
    if not connected or isinstance(error, RendezvousLostError):
        remedy = "the rendezvous is gone: close this trainer, make a new trainer"
    reason = str(error).removeprefix(f"epoch {epoch} failed: ")
    return SyncFailedError(epoch, reason, remedy)
