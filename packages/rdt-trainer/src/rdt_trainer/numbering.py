"""Which epoch comes next on this rank."""

from collections.abc import Callable

from rdt_plan import EpochRecord
from rdt_transport.errors import EpochFailedError

__all__ = ["EpochNumbering"]


class EpochNumbering:
    """Keeps one rank in step with the epochs that the rendezvous issues.

    A begin that fails leaves it open whether the epoch exists: another rank may have opened it a
    moment later, and given it up because this one never came. So it is asked for once more, and
    only if it has failed meanwhile is it left behind.

    Attributes:
        next: the epoch to begin next; the first is 1.
    """

    def __init__(self) -> None:
        self.next = 1
        self._doubtful = 0

    def begin(self, open_epoch: Callable[[int], EpochRecord]) -> EpochRecord:
        """Open the next epoch by ``open_epoch``, whose errors pass through."""
        try:
            return self._open(open_epoch)
        except EpochFailedError:
            doubtful = self.next == self._doubtful
            self.next += 1
            if not doubtful:
                raise
        return self._open(open_epoch)

    def _open(self, open_epoch: Callable[[int], EpochRecord]) -> EpochRecord:
        try:
            record = open_epoch(self.next)
        except EpochFailedError:
            raise
        except BaseException:
            self._doubtful = self.next
            raise
        self.next = record.epoch + 1
        return record
