"""The ways in which our backend is measured: each variant, with all combinations of settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from rdt_trainer import ModuleSource, ShardedModuleSource

__all__ = ["SOURCES", "VARIANTS", "Way", "numbers", "ways"]

VARIANTS: dict[str, dict[str, Any]] = {
    "rdt": {},
    "rdt unthreaded": {"read_threads": 0},
    "rdt staged": {"direct": False, "live": False},
}
"""By name, what goes into a worker's init info."""

SOURCES = {"shards": ShardedModuleSource, "gathered": ModuleSource}
"""How a trainer of several ranks may serve its weights; one rank has nothing to gather."""


@dataclass(frozen=True)
class Way:
    """One row of the table.

    Attributes:
        source: one of `SOURCES`.
        options: for the worker's init info.
        is_first: whether it is the first combination of settings of its variant and source.
    """

    name: str
    variant: str
    source: str
    num_slots: int
    max_chunk_mib: int
    options: dict[str, Any] = field(default_factory=dict)
    is_first: bool = True


def numbers(listed: str) -> list[int]:
    """Of a comma list, in its order; none of an empty one."""
    return [int(each) for each in listed.split(",") if each.strip()]


def ways(
    variants: Sequence[str],
    slots: Sequence[int],
    max_chunk_mib: Sequence[int],
    read_threads: Sequence[int] = (),
    sources: Sequence[str] = (),
) -> list[Way]:
    """All of them, a variant's and a source's together; their names are distinct.

    Args:
        read_threads: without any, as many as the worker chooses. Variants that have a number of
            their own keep that.
        sources: of several ranks; their rows then name it.

    Raises `ValueError` for a name that is unknown.
    """
    for known, given in ((VARIANTS, variants), (SOURCES, sources)):
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"{unknown[0]!r} is unknown: expected one of {list(known)}")
    found = []
    for variant, source in product(variants, sources or ("",)):
        own = VARIANTS[variant]
        threads = read_threads if read_threads and "read_threads" not in own else (None,)
        for at, (count, mib, posting) in enumerate(product(slots, max_chunk_mib, threads)):
            name = f"{variant}, {source}" if source else variant
            if len(slots) * len(max_chunk_mib) > 1:
                name += f", {count} slots of {mib} MiB"
            if len(threads) > 1:
                name += f", {posting} reading threads"
            options = own if posting is None else {**own, "read_threads": posting}
            found.append(Way(name, variant, source or "gathered", count, mib, options, at == 0))
    return found
