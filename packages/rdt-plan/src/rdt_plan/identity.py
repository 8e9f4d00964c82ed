"""Who pulls: the identity of a consumer."""

from dataclasses import dataclass

__all__ = ["ConsumerId"]


@dataclass(frozen=True, slots=True, order=True)
class ConsumerId:
    """One worker of one inference replica; replicas may differ in size.

    Attributes:
        replica: index of the inference deployment.
        worker: index of the worker in it.

    >>> str(ConsumerId(0, 1))
    'r0w1'
    """

    replica: int
    worker: int

    def __str__(self) -> str:
        return f"r{self.replica}w{self.worker}"
