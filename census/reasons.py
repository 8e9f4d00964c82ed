"""An exception as one stable line: no addresses, no folders of this machine."""

import re
import sys
import traceback
from collections.abc import Iterable

from census.comparison import pattern_of, patterns
from rdt_bake import CoverageError, RecordError, Uncovered
from rdt_vllm.errors import UnsupportedError

__all__ = ["crash_reason", "refusal_reason"]

_LONGEST = 300

# Whose lines say something, and which of them say less than their callers.
_PACKAGES = re.compile(r"/(vllm|transformers|rdt_\w+|census)/")
_MACHINERY = re.compile(r"/(weight_transfer|model_loader/reload|census)/")


def refusal_reason(error: Exception) -> str:
    """Why one of our typed errors refuses: the operation and the line first, if there are any."""
    kind = type(error).__name__
    if isinstance(error, RecordError):
        what = error.op or _first_line(error)
        where = f" at {_shortened(error.where)}" if error.where else ""
        weight = f" (weight {pattern_of(error.weight)})" if error.weight else ""
        return f"{kind}: {what}{where}{weight}"
    if isinstance(error, CoverageError):
        return f"{kind}: {patterns(_lacking(error.uncovered))}"
    if isinstance(error, UnsupportedError) and isinstance(error.__cause__, Exception):
        return f"{kind}: the loaders raise {crash_reason(error.__cause__)}"
    return f"{kind}: {_first_line(error)}"


def crash_reason(error: BaseException) -> str:
    """The first sentence of what was raised, and the innermost line of vLLM's or ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _PACKAGES.search(f.filename)]
    told = [f for f in frames if not _MACHINERY.search(f.filename)] or frames
    where = f" at {_shortened(f'{told[-1].filename}:{told[-1].lineno}')}" if told else ""
    what = _first_line(error).split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {what}{where}"


def _lacking(uncovered: Iterable[Uncovered]) -> list[str]:
    return [f"{each.module}.{each.param} lacks {_extent(each)}".lstrip(".") for each in uncovered]


def _extent(each: Uncovered) -> str:
    total = 1
    for extent in each.shape:
        total *= extent
    return "everything" if each.num_missing == total else "a part"


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    first, *more = text.splitlines()
    if type(error).__name__ == "ValidationError" and more:
        first = more[0].strip()  # the first line of pydantic's only counts
    line = re.sub(r"'[^']*'", lambda quoted: pattern_of(quoted[0]), first)
    return _shortened(line)[:_LONGEST]


def _shortened(text: str) -> str:
    """Without the folders above a package, or above this program, and without addresses."""
    text = re.sub(r"/\S*/(?:site-packages|src)/", "", text)
    for folder in sorted({p.rstrip("/") for p in sys.path if p.startswith("/")}, key=len)[::-1]:
        text = text.replace(f"{folder}/", "")
    text = re.sub(r"/tmp/\S*/", "", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
