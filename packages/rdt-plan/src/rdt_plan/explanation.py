"""A plan as text, for people who ask why a sync moves what it moves."""

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdt_plan.chunks import Chunk
    from rdt_plan.plan import SyncPlan
    from rdt_plan.program import Program

__all__ = ["explain"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def explain(plan: "SyncPlan") -> str:
    """A header, one line a chunk in plan order, and totals; several lines, no trailing newline."""
    lines = [
        f"plan {plan.digest[:12]} of {plan.consumer}: {_count(plan.chunks, 'chunk')} of at most "
        f"{_size(plan.max_chunk_bytes)} from {_ranks(plan.owners)}",
        f"manifest {plan.manifest_digest[:12]}, {_count(plan.schedule, 'gather group')}, "
        f"{plan.num_slots} receive slots of {_size(plan.receive_slot_bytes)}",
    ]
    group = None
    for chunk in plan.chunks:
        if chunk.serve.group != group:
            group = chunk.serve.group
            lines.append(f"group {group} (scheduled {plan.schedule.index(group)}):")
        lines.append(f"  {_chunk(chunk)}")
    lines += [f"program of {_program(each, plan)}" for each in plan.programs]
    lines.append(
        f"total: pulls {_size(plan.bytes_pulled)} ({_size(plan.slice_bytes)} of slices; "
        f"{_size(plan.direct_bytes)} direct, {_size(plan.staged_bytes)} staged), "
        f"lands {_size(plan.bytes_landed)} in {_count(plan.modules, 'module')}, "
        f"{_count(plan.fills, 'fill')}, "
        f"{_count(plan.modules_without_chunks, 'module')} without chunks" + _staged(plan)
    )
    return "\n".join(lines)


def _chunk(chunk: "Chunk") -> str:
    serve = chunk.serve
    way = f"serve slot {serve.serve_slot} -> receive slot {chunk.receive_slot}"
    text = (
        f"chunk {chunk.index}: owner {chunk.owner} seq {serve.seq}, "
        f"{'direct' if chunk.is_direct else way}, "
        f"{_size(serve.num_bytes)}, {_count(serve.slices, 'slice')}, "
        f"{_count(chunk.placements, 'placement')}, "
        f"{_span(slice_.name for slice_ in serve.slices)}"
    )
    if chunk.complete:
        text += f"; completes {_span(module or '(root)' for module in chunk.complete)}"
    return text


def _program(program: "Program", plan: "SyncPlan") -> str:
    operations = dict.fromkeys(statement.op for statement in program.statements)
    return (
        f"{program.module or '(root)'}: {_span(program.targets)} from "
        f"{_span(slice_.name for _, slice_ in program.inputs) or 'no slice'} "
        f"({_size(plan.staging_bytes[program.module])}) by {_span(operations)}"
    )


def _staged(plan: "SyncPlan") -> str:
    if not plan.programs:
        return ""
    staged = _size(sum(plan.staging_bytes.values()))
    return f", {_count(plan.programs, 'program')} from {staged}"


def _span(names: Iterable[str]) -> str:
    """The first and the last of ``names``, and how many lie between them."""
    names = list(dict.fromkeys(names))
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "nobody"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def _size(num_bytes: int) -> str:
    """``num_bytes`` with a binary unit.

    >>> _size(12), _size(1536)
    ('12 B', '1.5 KiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.1f} {unit}"
