"""Run every benchmark of this folder that runs on CPU, one after another, and print one table.

A benchmark is a module `bench_<name>` whose last line is one JSON object with its ratios; it may be
run alone: ``hatch run python -m bench.bench_<name>``. One that fails is a row of the table, and the
exit status; the others run all the same.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.child import follow_parent

FOLDER = Path(__file__).parent

Found = dict[str, Any]

AT_MOST: dict[tuple[str, str], Callable[[Found], float]] = {
    ("bake", "peak_memory_ratio"): lambda found: 1.0,
    ("sync", "ratio"): lambda found: 1.3,
    ("sync", "messages_beyond_two_a_chunk"): lambda found: 4,
    ("planning", "slowest_ratio"): lambda found: 3.0,
    ("planning", "state_bytes_a_name_ratio"): lambda found: 1.1,
    ("idle", "idle_cores_attached"): lambda found: found["idle_cores_unattached"] + 0.01,
    ("sources", "gather_groups"): lambda found: found["groups_allowed"],
    ("sources", "shards_chunks"): lambda found: 2.0,
    ("sources", "shards_direct_total_chunks"): lambda found: 2.0,
    ("sources", "shards_total_chunks"): lambda found: 2.0,
    ("sources", "shards_grow_chunks"): lambda found: 2.05,  # two, and what memory varies by
    ("sources", "masters_total_chunks"): lambda found: 2.0,
    ("sources", "bytes_ratio"): lambda found: 1.02,
}
"""The most that a measure may be, by benchmark and measure, given what was found beside it."""

AT_LEAST: dict[tuple[str, str], Callable[[Found], float]] = {
    ("bake", "bake_ratio"): lambda found: min(2.2, 0.9 * found["bound_ratio"]),
    ("bake", "plan_ratio"): lambda found: 1.5,
}
"""The least that a measure may be, given what was found beside it.

No recorder that runs the loaders can be faster than the loaders alone (``bound_ratio``).
"""


def run(name: str) -> Found | str:
    """Run one benchmark, showing what it prints: its last line's object, or what went wrong."""
    command = [sys.executable, "-m", f"bench.bench_{name}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER.parent,
        preexec_fn=partial(follow_parent, os.getpid()),
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line if line.strip() else last
    if process.wait() != 0:
        return f"failed with exit status {process.returncode}"
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else f"failed: its last line is no object: {last!r}"


def verdict(name: str, measure: str, found: Found) -> tuple[str, str]:
    """(target, whether it is met), empty where there is none."""
    value = found[measure]
    if (name, measure) in AT_LEAST:
        least = AT_LEAST[name, measure](found)
        return f"at least {least:.3g}", "met" if value >= least else "missed"
    if (name, measure) not in AT_MOST:
        return "", ""
    most = AT_MOST[name, measure](found)
    if "not comparable" in str(found.get("transport", "")):
        return f"at most {most:.3g}", "not comparable"
    return f"at most {most:.3g}", "met" if value <= most else "missed"


def rows(name: str, found: Found) -> Iterator[tuple[str, str, str, str]]:
    """(measure, value, target, whether it is met) of all that a benchmark found."""
    for measure, value in found.items():
        if measure == "models":
            for model, own in value.items():
                yield from ((f"{model} {row[0]}", *row[1:]) for row in rows(name, own))
        elif measure != "bench":
            shown = f"{value:.3g}" if isinstance(value, float) else str(value)
            yield measure, shown, *verdict(name, measure, found)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks; all when none")] = None,
) -> None:
    """Print the table of every benchmark that runs on CPU."""
    known = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    if unknown := sorted(set(names or ()) - set(known)):
        raise typer.BadParameter(f"no benchmark {', '.join(unknown)}: expected {', '.join(known)}")
    table = Table("benchmark", "measure", "value", "target", "")
    failed = False
    for name in names or known:
        found = run(name)
        if isinstance(found, str):
            failed = True
            table.add_row(name, "", found, "", "failed")
            continue
        for row in rows(name, found):
            table.add_row(name, *row)
    Console().print(table)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
