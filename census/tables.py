"""The census in two files: a table to read, and rows for programs."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from census.implementations import Implementation
from census.outcome import UNSERVED, Status
from census.quantised_checkpoint import QUANTISED
from census.rows import Row, in_order
from census.variants import VARIANTS

__all__ = ["summary", "write_tables"]

_MARKS = {
    Status.EXACT: "exact",
    Status.REFUSED: "refused",
    Status.UNBUILDABLE: "unbuildable",
    Status.WRONG: "**wrong**",
}
_FILES = {
    Implementation.OURS: "model-support",
    Implementation.STOCK: "model-support-vllm",
}
_INTRODUCTIONS = {
    Implementation.OURS: """# Which models can be synced

Backend `rdt`, on every architecture that vLLM {version} registers. Each is built tiny, with random
weights. A model that holds other weights is recorded, planned and written to as a worker does it,
up to post-processing, and then held against one that has loaded the checkpoint normally: every
parameter, buffer and tensor attribute, bit for bit. The recorded model must be left as it was
found. Where all ranks of a layout are exact together, each name of the checkpoint is pulled by one
at least, unless no rank's normal load makes anything of its values, which is told below.""",
    Implementation.STOCK: """# Which models vLLM's own `sharded_rdt` can sync

vLLM {version}'s recorder and planner, on every architecture that vLLM registers, held to the same
comparison as [ours](model-support.md). Its records are replayed in plain torch as its engine does,
up to post-processing. Python 3.11 is part of the result: planning uses slices as dictionary keys,
which Python 3.12 allows.""",
}
_LEGEND = """`{command}` makes this page. Columns are ranks of layouts: `tp2r1` is rank 1 of 2 with
tensor parallelism, `ep2r1` the same with experts parallel as well; `tp4` and `ep4` are all four
ranks, each as above. Draft models are loaded by themselves: an engine that drafts is refused.

* **exact**: equal, bit for bit.
* **refused**: refused when a worker initialises, before anything is changed.
* **unbuildable**: not tried, or a CPU without the real checkpoint does not get as far as a normal
  load. Other ranks are not tried then.
* **wrong**: not equal."""

_QUANTISED = """Quantised layers hold drawn bytes. No kernel runs: where a CPU has none for a
quantisation, one that it lacks stands for it, so that the model can be built, and the model is
recorded as it was loaded. What is exact here is so up to post-processing, as everything on this
page; which quantisations a worker also post-processes again is told below."""


def write_tables(
    rows: Sequence[Row],
    implementation: Implementation,
    modes: Sequence[str],
    version: str,
    folder: Path,
) -> list[Path]:
    """Write both files into ``folder``, and return them."""
    rows = in_order(rows, modes)
    stem = folder / _FILES[implementation]
    lines = [
        json.dumps(
            {
                "arch": row.arch,
                "mode": row.mode,
                "status": row.outcome.status,
                "reason": row.outcome.reason,
            }
        )
        for row in rows
    ]
    as_json, as_text = stem.with_suffix(".json"), stem.with_suffix(".md")
    as_json.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    as_text.write_text("\n".join(_page(rows, implementation, modes, version)) + "\n")
    return [as_text, as_json]


def summary(rows: Sequence[Row]) -> str:
    """How many architectures have which status, on all of the ranks that can be built."""
    counts = Counter(_overall(group) for group in _by_arch(rows).values())
    shown = (Status.EXACT, Status.REFUSED, Status.WRONG, Status.UNBUILDABLE)
    parts = ", ".join(f"{counts[status]} {status}" for status in shown)
    unserved = len({row.arch for row in rows if UNSERVED in row.outcome.reason})
    note = f"; {unserved} of the exact are quantised in ways that no worker serves yet"
    return (
        f"{sum(counts.values())} architectures and variants: {parts}; {len(rows)} cases"
        f"{note if unserved else ''}"
    )


def _pulled(row: Row) -> float:
    landed = row.outcome.bytes_landed
    return row.outcome.bytes_pulled / landed if landed else 0.0


def _by_arch(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.arch].append(row)
    return groups


def _overall(rows: Sequence[Row]) -> Status:
    return max((row.outcome.status for row in rows), key=list(Status).index)


def _page(
    rows: Sequence[Row], implementation: Implementation, modes: Sequence[str], version: str
) -> list[str]:
    ours = implementation is Implementation.OURS
    command = "hatch run census" + ("" if ours else f" --impl {implementation}")
    page = [_INTRODUCTIONS[implementation].format(version=version), ""]
    page += [f"**{summary(rows)}.**"]
    if ours and (worst := max(rows, key=_pulled, default=None)):
        page += [
            "",
            f"The most bytes pulled for each byte that lands: {_pulled(worst):.3f} "
            f"({worst.arch}, {worst.mode}).",
        ]
    page += ["", _LEGEND.format(command=command), ""]
    built = {
        arch: group
        for arch, group in _by_arch(rows).items()
        if any(row.outcome.status is not Status.UNBUILDABLE for row in group)
    }
    page += ["## Architectures", ""]
    page += _matrix({a: g for a, g in built.items() if "@" not in a}, modes)
    plain = VARIANTS.keys() - QUANTISED.keys()
    for title, names, text in (
        ("Variants", [name for name in VARIANTS if name in plain], []),
        ("Quantised", list(QUANTISED), [_QUANTISED, ""]),
    ):
        page += [f"## {title}", "", *text]
        page += [f"* `@{name}`: {VARIANTS[name]}" for name in names]
        cases = {a: g for a, g in built.items() if a.partition("@")[2] in names}
        page += ["", *_matrix(cases, modes)]
    for status in (Status.WRONG, Status.REFUSED, Status.EXACT, Status.UNBUILDABLE):
        page += _reasons(rows, status)
    return page


def _matrix(groups: dict[str, list[Row]], modes: Sequence[str]) -> list[str]:
    table = [_line("architecture", *modes), "|---" * (1 + len(modes)) + "|"]
    for arch, group in groups.items():
        marks = {row.mode: _MARKS[row.outcome.status] for row in group}
        table.append(_line(arch, *(marks.get(mode, "") for mode in modes)))
    return [*table, ""]


def _reasons(rows: Sequence[Row], status: Status) -> list[str]:
    """Each reason, if there is one, with the cases that have it; the commonest first."""
    cases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.outcome.status is status and row.outcome.reason:
            cases[row.outcome.reason][row.arch].append(row.mode)
    if not cases:
        return []
    title = {
        Status.WRONG: "Wrong: how",
        Status.REFUSED: "Refused: why",
        Status.EXACT: "Exact: with these remarks",
        Status.UNBUILDABLE: "Unbuildable: why",
    }[status]
    table = [f"## {title}", "", _line("reason", "cases"), "|---|---|"]
    for reason, archs in sorted(cases.items(), key=lambda each: (-len(each[1]), each[0])):
        who = ", ".join(f"{arch} ({' '.join(modes)})" for arch, modes in archs.items())
        table.append(_line(reason, who))
    return [*table, ""]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
