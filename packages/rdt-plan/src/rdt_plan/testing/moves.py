"""Which events a state machine accepts: for tests that draw any event in any order."""

import copy
import pickle
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

from rdt_plan.errors import PeerProtocolError, ProtocolError

__all__ = ["accepted_moves", "snapshot"]

M = TypeVar("M")
A = TypeVar("A")


def snapshot(value: object) -> object:
    """The state of ``value`` as plain values that can be compared."""
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, Enum):
        return {name: snapshot(each) for name, each in vars(value).items()}
    return copy.copy(value)


def accepted_moves(machine: M, moves: Iterable[Callable[[M], A]]) -> list[Callable[[M], A]]:
    """Those of ``moves`` that change the state of ``machine``; each is tried on a copy.

    Raises `AssertionError` when another one returns an action, or raises and changes something.
    """
    before, spare = snapshot(machine), pickle.dumps(machine)
    found = []
    for move in moves:
        tried = pickle.loads(spare)
        try:
            actions = move(tried)
        except (ProtocolError, PeerProtocolError):
            if snapshot(tried) != before:
                raise AssertionError(f"a refused move changed the state of {machine}") from None
            continue
        if snapshot(tried) != before:
            found.append(move)
        elif actions:
            raise AssertionError(f"{actions} without a change of {machine}")
    return found
