"""Every error of this package, under one root that users can catch."""

from typing import Any

__all__ = [
    "ClientError",
    "RankFailedError",
    "RdtTrainerError",
    "SettingsError",
    "SourceError",
    "SyncFailedError",
    "TrainerStateError",
]


class RdtTrainerError(Exception):
    """Root of the errors of ``rdt_trainer``; each can be pickled, as Ray and processes carry it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), *self.args), vars(self)


def _made_again(kind: type[RdtTrainerError], *args: object) -> RdtTrainerError:
    """Without ``__init__``, which many want more for than the message."""
    return kind.__new__(kind, *args)


class SettingsError(RdtTrainerError):
    """The arguments of a trainer, source or client contradict each other."""


class SourceError(RdtTrainerError):
    """A weight source describes itself wrongly, or yields other than what it described."""


class ClientError(RdtTrainerError):
    """A call to the inference server failed.

    Attributes:
        server_text: what the server said, or what stopped us from hearing it.
        status: the HTTP status, where there was one.
    """

    def __init__(self, message: str, *, server_text: str, status: int | None = None) -> None:
        super().__init__(message)
        self.server_text = server_text
        self.status = status


class RankFailedError(RdtTrainerError):
    """Another trainer rank failed while the job was opened, so this one cannot go on.

    Attributes:
        rank: the rank that failed; it raises the error itself.
        reason: that error's type and words.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"trainer rank {rank} failed while the job was opened: {reason}")
        self.rank = rank
        self.reason = reason


class SyncFailedError(RdtTrainerError):
    """An epoch was given up; the workers may be torn until a complete sync heals them.

    Attributes:
        epoch: the epoch that failed.
        reason: what failed first, here or on another rank.
    """

    def __init__(
        self,
        epoch: int,
        reason: str,
        remedy: str = "call send_weights() again once the cause is gone",
    ) -> None:
        super().__init__(
            f"sync of epoch {epoch} failed: {reason}; the inference workers may be torn until "
            f"a complete sync: {remedy}"
        )
        self.epoch = epoch
        self.reason = reason


class TrainerStateError(RdtTrainerError):
    """A trainer was used before init(), after close(), or by two threads at once."""
