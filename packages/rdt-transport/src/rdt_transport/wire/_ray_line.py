"""A line to one office: letters out, in the order they are posted, and letters in."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rdt_transport.wire._ray_office import Letter

__all__ = ["OfficeLine", "Sent"]

Sent = Callable[[str | None], None]
"""Called once a letter is in its box (None), or cannot be any more (why)."""

_TAKE_SECONDS = 60.0  # an office forgets the call of a dead process after it


class OfficeLine:
    """One call to the office for what goes out, one for what comes in: never more are open.

    Letters posted meanwhile travel together with the next call, as do those that arrive.

    Args:
        office: the actor's handle.
        name: whose letters are taken, and who posts.

    Attributes:
        takes: whether letters are asked for.
        lost: why the office is gone; None while it is there.
    """

    def __init__(self, office: Any, name: str) -> None:
        self.takes = True
        self.lost: str | None = None
        self._office = office
        self._name = name
        self._waiting: list[tuple[Letter, Sent | None]] = []
        self._travelling: list[Sent | None] = []
        self._posting: Future[bool] | None = None
        self._taking: Future[list[Letter]] | None = None

    def post(self, to: str, kind: str, content: Any = None, sent: Sent | None = None) -> None:
        """Have a letter delivered; returns at once."""
        if self.lost is not None:
            if sent is not None:
                sent(self.lost)
            return
        self._waiting.append(((to, self._name, kind, content), sent))
        self._send()

    def poll(self) -> list[Letter]:
        """What has arrived since; sends what waits. Returns at once."""
        if self.lost is not None:
            return []
        if self._posting is not None and self._posting.done():
            posting, self._posting = self._posting, None
            if (error := posting.exception()) is not None:
                self._lose(_reason(error))
            elif not posting.result():
                self._lose("it was closed")
            else:
                travelled, self._travelling = self._travelling, []
                self._tell(travelled, None)
                self._send()
        return [] if self.lost is not None else self._taken()

    def hang_up(self) -> None:
        """Leave the box, without waiting for anything; what was not sent is not."""
        if self.lost is None:
            self._office.post.remote([(self._name, self._name, "leave", None)])

    def _taken(self) -> list[Letter]:
        letters: list[Letter] = []
        if self._taking is not None and self._taking.done():
            taking, self._taking = self._taking, None
            if (error := taking.exception()) is not None:
                self._lose(_reason(error))
                return []
            letters = taking.result()
        if self.takes and self._taking is None:
            self._taking = self._office.take.remote(self._name, _TAKE_SECONDS).future()
        return letters

    def _send(self) -> None:
        if self._waiting and self._posting is None:
            letters = [letter for letter, _ in self._waiting]
            self._travelling = [sent for _, sent in self._waiting]
            self._waiting = []
            self._posting = self._office.post.remote(letters).future()

    def _lose(self, reason: str) -> None:
        self.lost = reason
        unsent, self._waiting = [sent for _, sent in self._waiting], []
        travelling, self._travelling = self._travelling, []
        self._tell([*travelling, *unsent], self.lost)

    @staticmethod
    def _tell(those: list[Sent | None], outcome: str | None) -> None:
        for sent in those:
            if sent is not None:
                sent(outcome)


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no reason given'}"
