"""Run every benchmark of this folder that runs on CPU, one after another, and print one table.

A benchmark is a script `bench_<name>.py` whose last line is one JSON object with its ratios; it may
be run alone: ``python bench/bench_<name>.py``.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent


def run(script: Path) -> dict[str, object]:
    """Run one benchmark, showing what it prints; the object of its last line."""
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line if line.strip() else last
    if process.wait() != 0:
        raise typer.Exit(process.returncode)
    return json.loads(last)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks; all when none")] = None,
) -> None:
    """Print the table of every benchmark that runs on CPU."""
    scripts = sorted(FOLDER.glob("bench_*.py"))
    known = {script.stem.removeprefix("bench_"): script for script in scripts}
    if unknown := sorted(set(names or ()) - known.keys()):
        raise typer.BadParameter(f"no benchmark {', '.join(unknown)}: expected {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    table = Table("benchmark", "measure", "value")
    for script in chosen:
        for key, value in run(script).items():
            if key != "bench":
                shown = f"{value:.3g}" if isinstance(value, float) else str(value)
                table.add_row(script.stem.removeprefix("bench_"), key, shown)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
