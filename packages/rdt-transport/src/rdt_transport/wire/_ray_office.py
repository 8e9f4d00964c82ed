"""The office of a ray wire: an actor that keeps letters until those they are for ask for them.

A driver cannot be called, and an actor not while a method of its own runs, so a process that serves
has this actor beside it. It is sent to Ray by value and imports the standard library only: its
process loads neither torch nor this package, nor need it have them.
"""

import asyncio
import contextlib
from typing import Any

__all__ = ["Letter", "Office"]

Letter = tuple[str, str, str, Any]
"""Whom it is for, whom it is from, its kind, its content."""


class _Box:
    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.changed = asyncio.Event()


class Office:
    """Letters by name of the receiver; each box has one process that takes from it.

    Args:
        proof: what whoever comes to know this office reads first.
    """

    def __init__(self, proof: list[Any]) -> None:
        self._proof = proof
        self._boxes: dict[str, _Box] = {}
        self._closed = False

    async def proof(self) -> list[Any]:
        """What the constructor was given; nothing once closed."""
        return [] if self._closed else self._proof

    async def post(self, letters: list[Letter]) -> bool:
        """Put them into their boxes, in order; of kind "leave": throw the receiver's box away.

        False when closed; not an error, which Ray would log for whoever does not wait for it.
        """
        if self._closed:
            return False
        for letter in letters:
            name, _, kind, _ = letter
            if kind == "leave":
                if (left := self._boxes.pop(name, None)) is not None:
                    left.changed.set()
                continue
            box = self._box(name)
            box.letters.append(letter)
            box.changed.set()
        return True

    async def take(self, name: str, seconds: float) -> list[Letter]:
        """What lies in the box, as soon as anything does; nothing after ``seconds``."""
        box = self._box(name)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(box.changed.wait(), seconds)
        box.changed.clear()
        letters, box.letters = box.letters, []
        return letters

    async def close(self) -> None:
        """Accept nothing more."""
        self._closed = True

    def _box(self, name: str) -> _Box:
        return self._boxes.setdefault(name, _Box())
