"""Every error of this package, under one root that users can catch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdt_bake.recording import Uncovered

__all__ = [
    "ComputedValueError",
    "CoverageError",
    "DataDependentError",
    "OverlapError",
    "RdtBakeError",
    "RebindError",
    "RecordError",
    "ReplayError",
    "UnsupportedTensorError",
]


class RdtBakeError(Exception):
    """Root of the errors of ``rdt_bake``."""


class RecordError(RdtBakeError):
    """A loader did something that cannot be recorded.

    Attributes:
        weight: the source tensor's name, when one is known.
        op: the aten operation, as torch spells it, when one is known.
        where: ``file:line`` of the loader, when known.
        module: dotted path of the destination's module, when there is a destination.
        param: the destination's attribute name in that module.
    """

    def __init__(
        self,
        message: str,
        *,
        weight: str | None = None,
        op: str | None = None,
        where: str | None = None,
        module: str | None = None,
        param: str | None = None,
    ) -> None:
        subject = [] if weight is None else [f"weight {weight!r}"]
        if param is not None:
            subject.append(f"destination {f'{module}.{param}' if module else param!r}")
        head = f"{', '.join(subject)}: " if subject else ""
        super().__init__(f"{head}{message}" + (f" (at {where})" if where else ""))
        self.weight = weight
        self.op = op
        self.where = where
        self.module = module
        self.param = param


class ComputedValueError(RecordError):
    """A value would land that no program can make again (random numbers, an unknown operation)."""


class DataDependentError(RecordError):
    """A loader asks for a value that is not there while recording (``.item()``, a mask)."""


class RebindError(RecordError):
    """A loader put another tensor in a parameter's place, and it cannot be followed."""


class OverlapError(RecordError):
    """Two writes overlap in a way that cannot be made independent of their order."""


class UnsupportedTensorError(RecordError):
    """A tensor is sparse, conjugated, negated, or of a subclass with its own dispatch."""


class ReplayError(RdtBakeError):
    """Bytes or a destination do not fit the write that is replayed."""


class CoverageError(RdtBakeError):
    """Regions of parameters are written by no weight.

    Attributes:
        uncovered: what stays unwritten.
    """

    def __init__(self, message: str, uncovered: Sequence["Uncovered"]) -> None:
        super().__init__(message)
        self.uncovered = tuple(uncovered)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.uncovered), vars(self)
