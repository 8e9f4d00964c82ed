"""Running cases: a checkpoint an architecture, then one process a case."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from census.architectures import why_not_attempted
from census.case import run_case
from census.checkpoint import has_experts, write
from census.damage import Damage
from census.forks import Forks, Job
from census.implementations import Implementation
from census.modes import Mode
from census.outcome import Outcome, Status
from census.rows import Results, Row
from census.together import ignored, merged, what_counts

__all__ = ["Census"]

_TIMEOUT_SECONDS = 240.0

_NOTHING = Outcome(Status.UNBUILDABLE, "not run yet")


@dataclass(frozen=True, slots=True)
class Census:
    """What to run.

    Attributes:
        implementation: whose sync.
        modes: ranks to play; the first one decides whether an architecture is buildable.
        seed: of all weights.
        damage: a fault for every replay.
        work: a folder for checkpoints, which are removed after use, and for logs, which stay.
        results: what is known already, and takes what is found.
    """

    implementation: Implementation
    modes: Sequence[Mode]
    seed: int
    damage: Damage | None
    work: Path
    results: Results

    def run(self, names: Sequence[str], num_processes: int, shown: Callable[[Row], None]) -> None:
        """Run the cases of ``names`` that are not known yet; ``shown`` is given each row."""
        more: list[Job] = []
        jobs = self._checkpoints(names, more, shown)
        Forks(num_processes, _TIMEOUT_SECONDS).run(jobs, more)

    def _checkpoints(
        self, names: Sequence[str], more: list[Job], shown: Callable[[Row], None]
    ) -> Iterator[Job]:
        for name in names:
            cases = _Cases(self, name, more, shown)
            if cases.finished:
                continue
            reason = why_not_attempted(name)
            if reason is None:
                yield cases.checkpoint()
            else:
                cases.finish(self.modes[0], Outcome(Status.UNBUILDABLE, reason))


class _Cases:
    """The cases of one architecture, one after another."""

    def __init__(
        self, census: Census, name: str, more: list[Job], shown: Callable[[Row], None]
    ) -> None:
        self._census = census
        self._name = name
        self._more = more
        self._shown = shown
        self._folder = census.work / name
        known = census.results.rows
        self._left = [mode for mode in census.modes if (name, str(mode)) not in known]
        self.finished = not self._left or self._is_unbuildable()

    def checkpoint(self) -> Job:
        """Writes the checkpoint, and is followed by the cases."""

        def done(_: None, failure: str) -> None:
            if failure:
                self.finish(self._census.modes[0], Outcome(Status.UNBUILDABLE, failure))
                return
            if not has_experts(self._folder):
                self._left = [mode for mode in self._left if not mode.expert_parallel]
            self._go_on()

        return Job(lambda: write(self._name, self._folder), self._log("checkpoint"), done)

    def finish(self, mode: Mode, outcome: Outcome) -> None:
        """Keep and show what came of ``mode``."""
        row = Row(self._name, str(mode), outcome)
        self._census.results.add(row)
        self._shown(row)

    def _go_on(self) -> None:
        if not self._left or self._is_unbuildable():
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        mode = self._left.pop(0)
        census, outcomes = self._census, dict.fromkeys(mode.ranks, _NOTHING)

        def one(rank: Mode) -> Callable[[], Outcome]:
            return lambda: run_case(
                self._name, self._folder, rank, census.implementation, census.seed, census.damage
            )

        def done(rank: Mode, outcome: Outcome | None, failure: str) -> None:
            outcomes[rank] = outcome or Outcome(Status.WRONG, f"crashed: {failure}")
            if _NOTHING in outcomes.values():
                return
            together = merged(list(outcomes.values()))
            if mode.rank is None and together.unread:
                self._ask_what_counts(mode, together)
            else:
                self.finish(mode, together)
                self._go_on()

        for rank in mode.ranks:
            self._more.append(Job(one(rank), self._log(str(rank)), partial(done, rank)))

    def _ask_what_counts(self, mode: Mode, together: Outcome) -> None:
        """No rank reads some names: does a normal load on any of them?"""
        census, counts, left = self._census, list[str](), list(mode.ranks)

        def one(rank: Mode) -> Callable[[], tuple[str, ...]]:
            return lambda: what_counts(self._name, self._folder, rank, census.seed, together.unread)

        def done(rank: Mode, found: tuple[str, ...] | None, failure: str) -> None:
            left.remove(rank)
            counts.extend(found if found is not None else [failure])
            if not left:
                self.finish(mode, ignored(together, counts))
                self._go_on()

        for rank in mode.ranks:
            self._more.append(Job(one(rank), self._log(f"{rank}.counts"), partial(done, rank)))

    def _is_unbuildable(self) -> bool:
        row = self._census.results.rows.get((self._name, str(self._census.modes[0])))
        return row is not None and row.outcome.status is Status.UNBUILDABLE

    def _log(self, what: str) -> Path:
        return self._census.work / f"{self._name}.{what}.log"
