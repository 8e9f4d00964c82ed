"""Strict readers of JSON values: each returns its value or raises `WireFormatError`."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from rdt_plan.digest import is_digest
from rdt_plan.errors import WireFormatError

__all__ = [
    "MAX_INTEGER",
    "MAX_NAME_CHARS",
    "array",
    "digest",
    "fields",
    "float_of",
    "hex32",
    "integer",
    "integers",
    "positive",
    "refuse",
    "rows",
    "short_name",
    "string",
    "strings",
]

MAX_INTEGER = (1 << 63) - 1
"""Offsets, strides and sizes are 64-bit wherever they end up."""

MAX_NAME_CHARS = 256
"""Of a job and of a wire."""

_HEX = frozenset("0123456789abcdef")

T = TypeVar("T")


def refuse(where: str, expected: str, found: Any) -> NoReturn:
    text = repr(found)
    if len(text) > 80:
        text = f"{text[:77]}..."
    raise WireFormatError(f"{where}: expected {expected}, found {text}")


def integer(value: Any, where: str) -> int:
    """0 to `MAX_INTEGER`; a bool is no integer."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        refuse(where, "an integer of 0 to 2**63-1", value)
    return value


def positive(value: Any, where: str) -> int:
    """1 to `MAX_INTEGER`."""
    if integer(value, where) == 0:
        refuse(where, "at least 1", value)
    return value


def float_of(value: Any, where: str) -> float:
    """Spelled in hexadecimal, so that it is exact; infinities and NaN are ``inf`` and ``nan``."""
    try:
        return float.fromhex(string(value, where))
    except (ValueError, OverflowError) as error:
        text = f"{where}: expected a hexadecimal float, found {value[:40]!r}"
        raise WireFormatError(text) from error


def string(value: Any, where: str) -> str:
    if type(value) is not str:
        refuse(where, "a string", value)
    return value


def short_name(value: Any, where: str) -> str:
    """1 to `MAX_NAME_CHARS` characters."""
    if not 1 <= len(string(value, where)) <= MAX_NAME_CHARS:
        expected = f"1 to {MAX_NAME_CHARS} characters"
        raise WireFormatError(f"{where}: expected {expected}, found {len(value)}")
    return value


def hex32(value: Any, where: str) -> str:
    """16 bytes as 32 lower-case hexadecimal digits."""
    if len(string(value, where)) != 32 or not _HEX.issuperset(value):
        refuse(where, "32 lower-case hexadecimal digits", value)
    return value


def digest(value: Any, where: str) -> str:
    """A SHA-256 as 64 lower-case hexadecimal digits."""
    if not is_digest(value):
        refuse(where, "64 lower-case hexadecimal digits", value)
    return value


def array(value: Any, where: str, length: int | None = None) -> list[Any]:
    """A list, of ``length`` values if given."""
    if type(value) is not list or (length is not None and len(value) != length):
        refuse(where, "an array" if length is None else f"an array of {length} values", value)
    return value


def integers(value: Any, where: str) -> tuple[int, ...]:
    return tuple([integer(item, where) for item in array(value, where)])


def strings(value: Any, where: str) -> tuple[str, ...]:
    return tuple([string(item, where) for item in array(value, where)])


def rows(value: Any, where: str, read: Callable[[Any], T]) -> tuple[T, ...]:
    """``read`` applied to each row; an error says which row it was."""
    values = []
    for index, row in enumerate(array(value, where)):
        try:
            values.append(read(row))
        except WireFormatError as error:
            raise WireFormatError(f"{where}[{index}].{error}") from error.__cause__
    return tuple(values)


def fields(value: Any, where: str, names: frozenset[str]) -> dict[str, Any]:
    """An object with exactly the keys ``names``."""
    if type(value) is not dict or value.keys() != names:
        found = sorted(value) if type(value) is dict else value
        refuse(where, f"an object with the keys {sorted(names)}", found)
    return value
