"""Routing: which of a name's owners serves which worker."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_plan.errors import RoutingError

if TYPE_CHECKING:
    from rdt_plan.ownership import Ownership

__all__ = ["Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Block-and-rotate M:N routing for the workers of one inference deployment.

    With at least as many owners as workers, each worker has a block of owners to itself and
    rotates through it; with fewer, neighbouring workers share an owner. The rotation counts only
    the gather groups that the owner set holds something of, so none of its ranks is skipped where
    layers alternate between owner sets. Deployments of one size resolve worker *w* alike, and all
    names of one owner set and group have one producer.

    Attributes:
        ownership: the owner sets.
        num_workers: size of the deployment.
    """

    ownership: "Ownership"
    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise RoutingError(f"expected at least one worker, found {self.num_workers}")

    def producer(self, owner_set: int, worker: int, group: int) -> int:
        """The rank that serves gather group ``group`` of ``owner_set`` to ``worker``.

        Raises:
            RoutingError: the worker does not exist, or nothing of the group is the owner set's.

        >>> from rdt_plan import Manifest, Ownership, ParamMeta
        >>> params = [ParamMeta(f"l.{i}.w", "int8", (1,), (0, 1, 2, 3)) for i in range(3)]
        >>> router = Router(Ownership.of(Manifest.build(params)), num_workers=2)
        >>> [router.producer(0, worker=1, group=group) for group in range(3)]
        [2, 3, 2]
        """
        self.check_worker(worker)
        turn = self.ownership.turns.get((owner_set, group))
        if turn is None:
            raise RoutingError(
                f"expected one of {len(self.ownership.owner_sets)} owner sets and a gather group "
                f"it holds something of, found owner set {owner_set} and group {group}"
            )
        owners = self.ownership.owner_sets[owner_set]
        first = worker * len(owners) // self.num_workers
        end = (worker + 1) * len(owners) // self.num_workers
        return owners[first + turn % max(end - first, 1)]

    def check_worker(self, worker: int) -> None:
        """Raise `RoutingError` unless the deployment has this worker."""
        if not 0 <= worker < self.num_workers:
            raise RoutingError(
                f"expected a worker below {self.num_workers}, found worker {worker}; "
                f"pass the number of workers of its own deployment"
            )
