"""An examination and its findings, as one JSON object and as text."""

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from rdt_transport.doctor.advice import Finding
from rdt_transport.doctor.examination import Examination, Memory, Pair
from rdt_transport.doctor.verdict import exit_status, is_slow

__all__ = ["SCHEMA", "as_json", "as_text"]

SCHEMA = 1
_WIDTH = 100


def as_json(found: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values; speeds in bytes a second, times in seconds, ``ratio`` is read to copy speed."""
    record = asdict(found)
    for pair, row in zip(found.pairs, record["pairs"], strict=True):
        row["slow"] = is_slow(found, pair)
        if pair.reads is not None:
            row["reads"]["ratio"] = pair.reads.ratio
    return {
        "schema": SCHEMA,
        "exit_status": exit_status(findings),
        "findings": [asdict(finding) for finding in findings],
        **record,
    }


def as_text(found: Examination, findings: Sequence[Finding]) -> str:
    """Tables for a person."""
    parts = [
        _table(("version", ""), list(found.versions.items())),
        _table(("variable", "value", "set by"), [
            (each.name, "" if each.value is None else each.value, each.origin)
            for each in found.settings
        ]),
        _table(("reads", "carried by", "how", "4 KiB", "64 MiB", "copy", "ratio", ""),
               [_pair_row(found, pair) for pair in found.pairs]),
        _table(("memory", "free", "rings"), [_memory_row(found, each) for each in found.memory]),
    ]  # fmt: skip
    if found.idle_cores is not None:
        parts.append(f"An idle agent takes {found.idle_cores:.2%} of a core.")
    parts += [_finding(each) for each in findings] or ["Nothing to improve was found."]
    return "\n\n".join(part for part in parts if part)


def _pair_row(found: Examination, pair: Pair) -> tuple[str, ...]:
    reads = pair.reads
    if reads is None:
        return (pair.name, "", "", "", "", "", "", "not measured")
    return (
        pair.name,
        reads.transport,
        reads.how,
        f"{reads.small_seconds * 1e6:.0f} us",
        f"{reads.bytes_per_second / 1e9:.2f} GB/s",
        f"{reads.copy_bytes_per_second / 1e9:.2f} GB/s",
        f"{reads.ratio:.2g}",
        "SLOW" if is_slow(found, pair) else "",
    )


def _memory_row(found: Examination, memory: Memory) -> tuple[str, ...]:
    free, wanted = memory.free_bytes, found.ring_bytes
    fits = "" if free is None or wanted is None else "fit" if wanted <= free else "do not fit"
    return (memory.device, "unknown" if free is None else f"{free / 2**30:.1f} GiB", fits)


def _finding(finding: Finding) -> str:
    lines = [f"{finding.severity.upper()}: {finding.name}"]
    for label in ("found", "expected", "why", "remedy"):
        indented = f"  {label + ':':10}"
        lines += wrap(
            getattr(finding, label), _WIDTH, initial_indent=indented, subsequent_indent=" " * 12
        )
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
