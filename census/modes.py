"""Which rank of which parallel layout a case plays."""

import re
from dataclasses import dataclass

__all__ = ["ALL_MODES", "Mode"]


@dataclass(frozen=True, slots=True)
class Mode:
    """One rank of one layout.

    Attributes:
        size: ranks of the layout.
        rank: this one's.
        expert_parallel: experts are split over the ranks whole, not each cut into shards.

    >>> Mode.parse("ep2r1")
    Mode(size=2, rank=1, expert_parallel=True)
    """

    size: int = 1
    rank: int = 0
    expert_parallel: bool = False

    @classmethod
    def parse(cls, text: str) -> "Mode":
        """``tp4r3`` is rank 3 of tensor parallel 4, ``ep2r1`` has its experts parallel as well."""
        found = re.fullmatch(r"(tp|ep)(\d+)r(\d+)", text)
        if found is None or int(found[3]) >= int(found[2]):
            raise ValueError(f"expected a mode such as tp2r1 or ep2r0, found {text!r}")
        return cls(int(found[2]), int(found[3]), found[1] == "ep")

    def __str__(self) -> str:
        return f"{'ep' if self.expert_parallel else 'tp'}{self.size}r{self.rank}"


ALL_MODES = tuple(map(Mode.parse, ("tp1r0", "tp2r0", "tp2r1", "tp4r3", "ep2r1")))
