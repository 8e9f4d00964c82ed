"""What the operator sees: progress while it runs, then a table or one JSON object."""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from rdt_trainer.push.outcome import PushOutcome, ServerOutcome
from rdt_trainer.push.pushing import Stage

__all__ = ["StageProgress", "show_outcome", "wide_console"]

REFRESH_SECONDS = 0.1

WIDE = 200  # columns of a file or pipe, where nothing need be shortened


class _Amount(DownloadColumn):
    """Bytes done, where somebody knows of how many."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class StageProgress:
    """One bar a stage, on ``console``; a context. `begin` is an `OnProgress` of `push`."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(binary_units=True),
            TimeElapsedColumn(),
            console=console,
        )
        self._shown: tuple[TaskID, Callable[[], int]] | None = None  # stages begin on any thread
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rdt-push-bar", daemon=True)

    def begin(self, stage: Stage, done: Callable[[], int], total: int) -> None:
        """End the bar there is, and follow another; ``total`` 0: nobody can tell."""
        if not self._ended.is_set():
            self._end()
            self._shown = self._progress.add_task(stage.value, total=total or None), done

    def __enter__(self) -> Self:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._end()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            if (shown := self._shown) is not None:
                task, done = shown
                self._progress.update(task, completed=done())

    def _end(self) -> None:
        if self._shown is not None:
            task, done = self._shown
            self._shown = None
            self._progress.update(task, completed=done(), total=done())
            self._progress.stop_task(task)


def wide_console() -> Console:
    """Of what the command prints: as wide as the terminal, or wide where there is none."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def show_outcome(console: Console, outcome: PushOutcome) -> None:
    """A table of servers and workers, then a sentence."""
    table = Table("server", "worker", "from rank", "tensors", "reads", "direct", "staged", "")
    for column in table.columns:
        column.overflow = "fold"  # whole also where it is narrow: of many servers ends differ
    for column in table.columns[1:7]:
        column.justify = "right"
    for server in outcome.servers:
        rows = [
            (
                str(each.worker),
                str(each.owner),
                f"{each.num_tensors:,}",
                f"{each.num_chunks:,}",
                f"{each.bytes_direct:,}",
                f"{each.bytes_staged:,}",
            )
            for each in server.workers
        ] or [("",) * 6]
        for at, row in enumerate(rows):
            first = at == 0
            url = Text(server.url if first else "")  # an address in brackets is no markup
            table.add_row(url, *row, _state(outcome, server) if first else "")
    console.print(table)
    for server in outcome.servers:
        if server.failure is not None:
            console.print(
                f"{server.url}: {server.failure}", style="red", markup=False, soft_wrap=True
            )
            console.print(server.state, style="red", markup=False, soft_wrap=True)
    console.print(_sentence(outcome), markup=False, highlight=False, soft_wrap=True)


def _state(outcome: PushOutcome, server: ServerOutcome) -> Text:
    if server.failure is not None:
        return Text("failed", "red")
    if outcome.is_dry_run:
        return Text("planned")
    return Text("verified" if outcome.is_verified else "pushed", "green")


def _sentence(outcome: PushOutcome) -> str:
    what = f"{outcome.num_tensors:,} tensors, {outcome.num_bytes:,} bytes of {outcome.checkpoint}"
    if outcome.is_dry_run:
        return f"{what}: nothing was pushed (dry run)"
    num_served = sum(server.failure is None for server in outcome.servers)
    return (
        f"{what}: served as {outcome.weight_version!r} by {num_served} of "
        f"{len(outcome.servers)} servers, after {outcome.seconds:.2f} s"
    )
