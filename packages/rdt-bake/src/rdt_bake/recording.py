"""What a recording returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rdt_bake.errors import CoverageError
from rdt_plan import Fill, Placement, Write
from rdt_plan.program import Program

__all__ = ["Recording", "Uncovered"]


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A parameter that the loaders left unwritten, in whole or in part.

    Attributes:
        module: dotted path of its module.
        param: its name there.
        shape: its shape.
        num_missing: how many of its elements nothing writes.
        bounds: half-open range per dim that holds all of them.
    """

    module: str
    param: str
    shape: tuple[int, ...]
    num_missing: int
    bounds: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        name = f"{self.module}.{self.param}" if self.module else self.param
        shape = "x".join(map(str, self.shape)) or "scalar"
        if all((lo, hi) == (0, n) for (lo, hi), n in zip(self.bounds, self.shape, strict=True)):
            where = ""
        else:
            where = " within [" + ", ".join(f"{lo}:{hi}" for lo, hi in self.bounds) + "]"
        return f"{name} ({shape}): {self.num_missing} elements missing{where}"


@dataclass(frozen=True, slots=True)
class Recording:
    """Where every weight lands, as one run of the model's own loaders wrote it.

    Attributes:
        writes: copies and fills in the loaders' order. No two copies overlap, and where a fill
            overlaps a copy the copy wins: run all fills of a module first, the rest in any order.
        programs: at most one a module, for the tensors that hold computed values; no write is in
            one of these. Run it when all its inputs are there.
        consumed: source names that the loaders copied from.
        ignored: the other source names, in the manifest's order.
        aliases: places that hold one and the same memory; writes name the first of each.
        uncovered: parameters with elements that nothing writes, and that are not exempt.
    """

    writes: tuple[Write, ...]
    consumed: frozenset[str]
    ignored: tuple[str, ...]
    aliases: tuple[tuple[tuple[str, str], ...], ...]
    uncovered: tuple[Uncovered, ...]
    programs: tuple[Program, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(write for write in self.writes if isinstance(write, Placement))

    @property
    def fills(self) -> tuple[Fill, ...]:
        return tuple(write for write in self.writes if isinstance(write, Fill))

    @property
    def bytes_pulled(self) -> int:
        """Bytes of the distinct slices that writes and programs read."""
        slices = {write.slice for write in self.placements}
        slices.update(each for program in self.programs for _, each in program.inputs)
        return sum(each.num_bytes for each in slices)

    def require_coverage(self) -> None:
        """Raises `CoverageError` naming every parameter that is not wholly written."""
        if self.uncovered:
            raise CoverageError(
                f"{len(self.uncovered)} parameters are not wholly written by the weights; load "
                "them, or exempt them if the engine never does:\n" + _grouped(self.uncovered),
                self.uncovered,
            )


def _grouped(uncovered: Sequence[Uncovered]) -> str:
    lines = []
    for module, members in groupby(uncovered, key=lambda each: each.module):
        lines.append(f"  module {module!r}:")
        lines += [f"    {each}" for each in members]
    return "\n".join(lines)
