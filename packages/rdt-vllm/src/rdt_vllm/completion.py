"""When a unit is complete: with the last chunk of its modules, in whatever order they come."""

from collections import Counter
from collections.abc import Sequence

from rdt_plan import Chunk, SyncPlan
from rdt_vllm.units import InstallUnit, InstallUnits

__all__ = ["Completion"]


class Completion:
    """Counts, in each sync, the chunks that complete a module of a unit.

    Chunks of one module come in plan order; those of modules that are tied to each other may be of
    different lanes, which do not wait for each other. Live units are left out, but for those with
    something to compute.

    Attributes:
        unread: the units for which nothing is read through slots.
    """

    def __init__(self, plan: SyncPlan, units: InstallUnits) -> None:
        computed = {each.module for each in (*plan.fills, *plan.programs)}
        counted = [
            unit
            for unit in units.all
            if not unit.is_live or any(path in computed for path in unit.modules)
        ]
        ids = {id(unit) for unit in counted}
        self._units: dict[int, Sequence[InstallUnit]] = {}  # by chunk, whose modules it completes
        for chunk in plan.chunks:
            if not chunk.is_direct:
                touched = {id(unit): unit for unit in map(units.of.__getitem__, chunk.complete)}
                self._units[chunk.index] = [touched[each] for each in touched if each in ids]
        self._num_chunks = Counter(id(unit) for each in self._units.values() for unit in each)
        self._missing = self._num_chunks.copy()
        self.unread = [unit for unit in counted if not self._num_chunks[id(unit)]]

    def begin(self) -> None:
        """No chunk of this sync has been scattered."""
        self._missing = self._num_chunks.copy()

    def scattered(self, chunk: Chunk) -> list[InstallUnit]:
        """The units that are complete with this chunk."""
        touched = self._units[chunk.index]
        self._missing.subtract(id(unit) for unit in touched)
        return [unit for unit in touched if not self._missing[id(unit)]]
