"""Whose recording and replay are under test."""

from enum import StrEnum

__all__ = ["Implementation"]


class Implementation(StrEnum):
    """One that `census.case` can make a sync of."""

    OURS = "ours"
    STOCK = "stock"
