"""The JSON form of a producer's sources: three columns, since a large job has 300,000 of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rdt_plan._fields import MAX_INTEGER, array, integers
from rdt_plan.errors import WireFormatError

__all__ = ["SourceRegion", "sources_form", "sources_of"]


class SourceRegion(NamedTuple):
    """Where what a producer holds of one name lies in its memory, contiguous, for all its life.

    ``param`` is the name's index in the manifest; the length is that of what the rank holds of it.
    """

    param: int
    address: int
    device: int


def sources_form(sources: Sequence[SourceRegion]) -> list[list[int]]:
    """All params, all addresses, all devices."""
    return [list(column) for column in zip(*sources, strict=True)] or [[], [], []]


def sources_of(value: Any) -> tuple[SourceRegion, ...]:
    columns = array(value, "sources", len(SourceRegion._fields))
    for column, name in zip(columns, SourceRegion._fields, strict=True):
        numbers = array(column, f"sources: {name}")
        if set(map(type, numbers)) - {int} or not _in_range(numbers):
            integers(numbers, f"sources: {name}")  # raises
    if len(set(map(len, columns))) > 1:
        lengths = [len(column) for column in columns]
        raise WireFormatError(f"sources: expected columns of one length, found {lengths}")
    params = columns[0]
    if any(a >= b for a, b in pairwise(params)):
        raise WireFormatError("sources: expected each parameter once, in the manifest's order")
    return tuple(map(SourceRegion._make, zip(*columns, strict=True)))


def _in_range(numbers: Sequence[int]) -> bool:
    return not numbers or 0 <= min(numbers) <= max(numbers) <= MAX_INTEGER
