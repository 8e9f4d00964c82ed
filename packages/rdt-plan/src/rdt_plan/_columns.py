"""Columns: what thousands of rows say, as lists that the C of Python writes, reads and checks."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from rdt_plan._fields import MAX_INTEGER, array, integers, refuse

__all__ = ["Numbers", "integer_column", "transposed"]


class Numbers(dict[Hashable, int]):
    """Distinct rows, numbered by first use.

    >>> numbers = Numbers()
    >>> numbers.column("abca"), list(numbers)
    ([0, 1, 2, 0], ['a', 'b', 'c'])
    """

    def __missing__(self, row: Hashable) -> int:
        number = self[row] = len(self)
        return number

    def column(self, rows: Iterable[Hashable]) -> list[int]:
        """The number of each row."""
        return list(map(self.__getitem__, rows))


def transposed(rows: Sequence[tuple[Any, ...]], width: int) -> Sequence[tuple[Any, ...]]:
    """The columns of rows of ``width`` values.

    >>> transposed([("a", 1), ("b", 2)], 2), transposed([], 2)
    ([('a', 'b'), (1, 2)], [(), ()])
    """
    return list(zip(*rows, strict=True)) or [()] * width


def integer_column(value: Any, where: str, below: int | None = None) -> Sequence[int]:
    """An array of integers from 0 up, checked as a whole; `WireFormatError` otherwise."""
    numbers = array(value, where)
    if not numbers:
        return numbers
    if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) <= MAX_INTEGER:
        integers(numbers, where)  # raises
    if below is not None and max(numbers) >= below:
        refuse(where, f"integers below {below}", max(numbers))
    return numbers
