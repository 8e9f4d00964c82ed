"""The command line: ``hatch run census``."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from census.damage import Damage
from census.implementations import Implementation
from census.modes import ALL_MODES, Mode
from census.outcome import Status
from census.rows import Results, Row, in_order
from census.startup import prepare_process
from census.tables import summary, write_tables

if TYPE_CHECKING:
    from census.run import Census

DOCS = Path(__file__).parent.parent / "docs"

_COLOURS = {
    Status.EXACT: "green",
    Status.REFUSED: "yellow",
    Status.UNBUILDABLE: "dim",
    Status.WRONG: "bold red",
}


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def main(
    archs: Annotated[str | None, typer.Option(help="comma-separated; all when left out")] = None,
    modes: Annotated[
        str | None, typer.Option(help="comma-separated, as tp2r1 or ep2r1; all when left out")
    ] = None,
    impl: Annotated[Implementation, typer.Option(help="whose sync")] = Implementation.OURS,
    jobs: Annotated[int, typer.Option(min=1, help="processes at once")] = 1,
    seed: Annotated[int, typer.Option(help="of all weights")] = 0,
    results: Annotated[
        Path | None, typer.Option(help="append rows there, and skip cases that it holds")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="keep each case's log there")] = None,
    damage: Annotated[
        Damage | None, typer.Option(help="damage every replay: all must come out wrong")
    ] = None,
) -> None:
    """Record, replay and compare vLLM's architectures; a run of all writes the tables in docs/.

    The exit status is 1 when anything is wrong with our own sync.
    """
    try:
        chosen = [Mode.parse(text) for text in _listed(modes)] or list(ALL_MODES)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--modes") from None
    prepare_process()
    import vllm

    from census.architectures import all_names
    from census.run import Census

    key = {"impl": impl, "seed": seed, "vllm": vllm.__version__, "damage": damage}
    names = all_names()
    if unknown := sorted(set(_listed(archs)) - set(names)):
        raise typer.BadParameter(f"vLLM has no {', '.join(unknown)}", param_hint="--archs")
    try:
        kept = Results(results, key)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--results") from None
    console = Console()
    with tempfile.TemporaryDirectory(prefix="rdt-census-") as folder:
        work = logs or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        census = Census(impl, chosen, seed, damage, work, kept)
        _run(census, _listed(archs) or names, jobs, console)
    known = (row for row in kept.rows.values() if row.arch in names)
    rows = in_order(known, map(str, chosen))
    console.print(summary(rows), soft_wrap=True)
    if archs is None and modes is None and damage is None:
        written = write_tables(rows, impl, list(map(str, chosen)), vllm.__version__, DOCS)
        console.print("wrote " + ", ".join(os.path.relpath(path) for path in written))
    wrong = any(row.outcome.status is Status.WRONG for row in rows)
    if wrong and impl is Implementation.OURS:
        raise typer.Exit(1)


def _run(census: "Census", names: list[str], jobs: int, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,  # a thread of its own would be forked away
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("architectures", total=len(names))
        seen: set[str] = set()

        def shown(row: Row) -> None:
            seen.add(row.arch)
            colour = _COLOURS[row.outcome.status]
            console.print(
                f"[{colour}]{row.arch:42} {row.mode:6} {row.outcome.status:11}[/] "
                f"{escape(row.outcome.reason)}",
                highlight=False,
                soft_wrap=True,
            )
            progress.update(task, completed=len(seen), refresh=True)

        census.run(names, jobs, shown)


if __name__ == "__main__":
    typer.run(main)
