"""What the rounds of a benchmark took, and where the time went."""

import statistics
import time
from collections.abc import Callable, Mapping

from rich.table import Table

__all__ = ["Spent", "Stages", "Tally", "blame"]

Stages = dict[str, float]
"""Seconds by stage."""

Spent = dict[str, dict[str, float]]
"""CPU seconds by process and thread."""


class Tally:
    """Rounds of one way to move the weights.

    Args:
        move: moves them once; returns each worker's seconds by stage.
        spent: the CPU time so far of every process.
    """

    def __init__(self, move: Callable[[], list[Stages]], spent: Callable[[], Spent]) -> None:
        self.seconds: list[float] = []
        self.stages: list[Stages] = []
        self.spent: Spent = {}
        self._move, self._now_spent = move, spent

    def round(self) -> None:
        """Move them once more."""
        before = self._now_spent()
        began = time.perf_counter()
        self.stages += self._move()
        self.seconds.append(time.perf_counter() - began)
        for process, threads in self._now_spent().items():
            total = self.spent.setdefault(process, {})
            for thread, seconds in threads.items():
                gained = seconds - before[process].get(thread, 0.0)
                total[thread] = total.get(thread, 0.0) + gained

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def busy_seconds(self) -> float:
        """CPU seconds of all processes, all rounds."""
        return sum(sum(threads.values()) for threads in self.spent.values())


def blame(tallies: Mapping[str, Tally]) -> Table:
    """Where the time went: what each thread computed, as a share of the rounds' wall time."""
    table = Table("process", "thread", *tallies, title="busy, % of the wall time of its rounds")
    rows = {
        (process, thread): None
        for tally in tallies.values()
        for process, threads in tally.spent.items()
        for thread in threads
    }
    for process, thread in sorted(rows):
        shares = [
            100 * tally.spent[process].get(thread, 0.0) / sum(tally.seconds)
            for tally in tallies.values()
        ]
        if max(shares) >= 0.5:
            table.add_row(process, thread, *(f"{share:.0f}" for share in shares))
    table.add_section()
    for stage in ("ready", "read", "scatter"):
        shares = [
            100 * statistics.fmean(stages.get(stage, 0.0) / stages["total"] for stages in t.stages)
            for t in tallies.values()
        ]
        table.add_row("a worker", f"in {stage}, summed over chunks", *(f"{s:.0f}" for s in shares))
    return table
