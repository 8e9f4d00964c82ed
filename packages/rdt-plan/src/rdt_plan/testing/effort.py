"""How long property tests search."""

import os

__all__ = ["FUZZ_VARIABLE", "num_examples"]

FUZZ_VARIABLE = "RDT_FUZZ"
"""Environment variable: how many times as many examples as usual."""


def num_examples(usual: int) -> int:
    """``usual``, times the number that `FUZZ_VARIABLE` holds, if it is set."""
    return usual * int(os.environ.get(FUZZ_VARIABLE, "1"))
