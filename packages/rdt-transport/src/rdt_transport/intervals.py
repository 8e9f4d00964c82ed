"""Intervals: when each stage of an epoch ran, chunk by chunk, for benchmarks."""

import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Interval", "Intervals"]


class Interval(NamedTuple):
    """One stage of one chunk.

    Attributes:
        stage: of a consumer "ready" (from the post before it to its own: it waited for the READY or
            a slot), "read" or "scatter"; of a producer "gather" (from the credit for a group to its
            publishing) or "pack"; of a trainer also "control", the steps that move no weights.
        chunk: index in the plan; of a producer, the seq, or the gather group that is gathered; -1
            where neither is meant.
        start: in seconds of `time.perf_counter`, one clock for all processes of a Linux host.
        end: the same.
    """

    stage: str
    chunk: int
    start: float
    end: float


class Intervals:
    """The intervals of one epoch of one party, in the order they ended; any thread adds."""

    def __init__(self) -> None:
        self._rows: list[Interval] = []

    def add(self, stage: str, chunk: int, start: float) -> None:
        """A stage that began at ``start`` ends now."""
        self._rows.append(Interval(stage, chunk, start, time.perf_counter()))

    def __iter__(self) -> Iterator[Interval]:
        return iter(tuple(self._rows))

    def __len__(self) -> int:
        return len(self._rows)
