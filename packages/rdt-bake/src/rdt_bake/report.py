"""A recording in words, for logs and for people."""

from collections import Counter

from rdt_bake.recording import Recording

__all__ = ["report"]

_MOST = 10


def report(recording: Recording) -> str:
    """A summary of a few lines: what lands, what is pulled, what nobody reads, what is missing.

    It says so when a worker would pull bytes that land nowhere or that land several times.
    """
    placements, fills = recording.placements, recording.fills
    slices = {write.slice for write in placements}
    slices.update(each for program in recording.programs for _, each in program.inputs)
    casts = Counter(
        f"{write.slice.dtype} -> {write.dtype}"
        for write in placements
        if write.slice.dtype != write.dtype
    )
    modules = {write.module for write in recording.writes}
    modules |= {program.module for program in recording.programs}
    lines = [
        f"{len(recording.consumed)} weights land in {len(modules)} modules by {len(placements)} "
        f"copies and {len(fills)} fills",
        f"{len(slices)} distinct slices of {recording.bytes_pulled} bytes are pulled",
    ]
    lines += [f"  cast {what}: {count} copies" for what, count in sorted(casts.items())]
    lines += _some(
        "modules that compute",
        [
            f"{each.module}: {', '.join(each.targets)} by {len(each.statements)} operations"
            for each in recording.programs
        ],
    )
    lines += _some("weights that nothing reads", recording.ignored)
    lines += _some(
        "tied tensors",
        [" = ".join(f"{m}.{p}" if m else p for m, p in group) for group in recording.aliases],
    )
    lines += _some("parameters not wholly written", [str(each) for each in recording.uncovered])
    return "\n".join(lines)


def _some(title: str, items: tuple[str, ...] | list[str]) -> list[str]:
    if not items:
        return []
    lines = [f"{len(items)} {title}:", *(f"  {item}" for item in items[:_MOST])]
    if len(items) > _MOST:
        lines.append(f"  ... and {len(items) - _MOST} more")
    return lines
