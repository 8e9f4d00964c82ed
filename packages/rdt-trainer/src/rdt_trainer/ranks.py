"""What the trainer ranks of one job tell each other over ``torch.distributed``."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rdt_trainer.errors import RankFailedError

__all__ = ["gather_from_ranks", "group_size"]

T = TypeVar("T")


def group_size() -> int | None:
    """Ranks of the default group; None where there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return None


def gather_from_ranks(make: Callable[[], T]) -> list[T]:
    """What ``make`` returns on each rank, by rank; a collective over the default group.

    A rank whose ``make`` raises takes part all the same, so that no rank waits for it: it raises
    its own error, the others raise `RankFailedError`. A rank that never comes is waited for as
    long as the group's own timeout says.
    """
    result: T | None = None
    problem: str | None = None
    failure: Exception | None = None
    try:
        result = make()
    except Exception as error:
        failure = error
        problem = f"{type(error).__name__}: {error}"  # as text: not every exception pickles
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (result, problem))
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise RankFailedError(rank, reason)
    return [result for result, _ in everyone]
