"""Trainer ranks in processes of their own, with ``torch.distributed`` between them."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from rdt_transport.testing.object_process import ObjectProcess

__all__ = ["RankProcesses"]

TIMEOUT_SECONDS = 300.0  # ranks import torch at once, and on a busy machine that takes minutes


@contextmanager
def _rank(
    make: Callable[..., AbstractContextManager[object]],
    rank: int,
    num_ranks: int,
    store: Path,
    arguments: tuple[object, ...],
) -> Generator[object]:
    torch.set_num_threads(1)  # they share few cores
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    try:
        with make(rank, *arguments) as held:
            yield held
    finally:
        torch.distributed.destroy_process_group()


class _RankProcess(ObjectProcess):
    TIMEOUT_SECONDS = TIMEOUT_SECONDS


class RankProcesses:
    """The ranks of a group over gloo, each with an object, which are asked all at once.

    Args:
        make: importable; called in each process with its rank and ``arguments``.
        num_ranks: how many.
        store: a path that is free, where the ranks meet.
    """

    def __init__(
        self,
        make: Callable[..., AbstractContextManager[object]],
        num_ranks: int,
        store: Path,
        *arguments: object,
    ) -> None:
        self._cleanup = ExitStack()
        self._ranks = [
            self._cleanup.enter_context(
                _RankProcess(_rank, make, rank, num_ranks, store, arguments)
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """What each returns, by rank; the first error is raised once all have answered."""
        for rank in self._ranks:
            rank.tell(method, *arguments)
        answers, errors = [], []
        for rank in self._ranks:
            try:
                answers.append(rank.answer())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers
