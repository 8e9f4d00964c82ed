"""Which rank of which parallel layout a case plays."""

import re
from dataclasses import dataclass, replace

__all__ = ["ALL_MODES", "Mode"]


@dataclass(frozen=True, slots=True)
class Mode:
    """One rank of one layout, or all of them together.

    Attributes:
        size: ranks of the layout.
        rank: this one's; None for all of them together.
        expert_parallel: experts are split over the ranks whole, not each cut into shards.

    >>> Mode.parse("ep2r1")
    Mode(size=2, rank=1, expert_parallel=True)
    """

    size: int = 1
    rank: int | None = 0
    expert_parallel: bool = False

    @classmethod
    def parse(cls, text: str) -> "Mode":
        """``tp4r3`` is rank 3 of tensor parallel 4, ``tp4`` all of its ranks together.

        ``ep2r1`` has its experts parallel as well.
        """
        found = re.fullmatch(r"(tp|ep)([1-9]\d*)(?:r(\d+))?", text)
        rank = int(found[3]) if found is not None and found[3] else None
        if found is None or (rank is not None and rank >= int(found[2])):
            raise ValueError(f"expected a mode such as tp2r1, ep2r0 or tp4, found {text!r}")
        return cls(int(found[2]), rank, found[1] == "ep")

    @property
    def ranks(self) -> "tuple[Mode, ...]":
        """A mode for each rank that is played, one after another."""
        if self.rank is not None:
            return (self,)
        return tuple(replace(self, rank=rank) for rank in range(self.size))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"r{self.rank}"
        return f"{'ep' if self.expert_parallel else 'tp'}{self.size}{rank}"


ALL_MODES = tuple(map(Mode.parse, ("tp1r0", "tp2r0", "tp2r1", "ep2r1", "tp4", "ep4")))
