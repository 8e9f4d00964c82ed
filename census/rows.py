"""Rows: what the census found out about each case, on disk and in memory."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from census.outcome import Outcome, Status

__all__ = ["Results", "Row", "in_order"]


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        arch: the architecture, perhaps with a variant.
        mode: the rank that was played.
        outcome: what came of it.
    """

    arch: str
    mode: str
    outcome: Outcome

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Row":
        fields = {key: value for key, value in values.items() if key not in ("arch", "mode")}
        outcome = Outcome(**{**fields, "status": Status(str(fields["status"]))})  # type: ignore[arg-type]
        return cls(str(values["arch"]), str(values["mode"]), outcome)

    def to_json(self) -> dict[str, object]:
        values = asdict(self.outcome)
        del values["unread"]  # long; what matters of it is in the reason
        return {"arch": self.arch, "mode": self.mode, **values}


def in_order(rows: Iterable[Row], modes: Iterable[str]) -> list[Row]:
    """By architecture, whatever its letters' case, then in the order of ``modes``."""
    position = {mode: number for number, mode in enumerate(modes)}
    return sorted(
        rows, key=lambda row: (row.arch.casefold(), row.arch, position.get(row.mode, 99), row.mode)
    )


class Results:
    """Rows in memory, and in a file where a census that was interrupted goes on.

    Args:
        path: one JSON object a line, appended to; None keeps nothing.
        key: what the rows depend on; a file that was written for another key is refused.

    Raises:
        ValueError: the file is of another key.
    """

    def __init__(self, path: Path | None, key: Mapping[str, object]) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._path = path
        if path is None:
            return
        head = json.dumps(dict(key))
        if not path.exists():
            path.write_text(f"{head}\n")
            return
        first, *lines = path.read_text().splitlines()
        if first != head:
            raise ValueError(f"{path} holds results of {first}, expected {head}: name another file")
        for line in lines:
            row = Row.from_json(json.loads(line))
            self.rows[row.arch, row.mode] = row

    def add(self, row: Row) -> None:
        self.rows[row.arch, row.mode] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(row.to_json())}\n")
