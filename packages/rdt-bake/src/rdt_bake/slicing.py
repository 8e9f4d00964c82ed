"""Cutting one module's operations out of a whole trace.

Whatever writes into memory that is needed is needed, and so is all that it reads: backwards from
the module's own tensors, in the loaders' order afterwards. Operations that lead nowhere drop out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import torch

from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import ComputedValueError
from rdt_bake.landings import Landing
from rdt_bake.lost_values import LostValueError
from rdt_bake.nodes import Node
from rdt_bake.origins import Brought, Computed, Source, View

__all__ = ["ModuleTrace", "module_traces"]

_aten = torch.ops.aten

_Moment = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ModuleTrace:
    """What one module's computed tensors come of.

    Attributes:
        module: its dotted path.
        storages: its tensors that something computed lands in, or that such a thing reads.
        nodes: all that writes into them, plain copies and fills too, in the loaders' order.
    """

    module: str
    storages: tuple[DestinationStorage, ...]
    nodes: tuple[Node, ...]


def module_traces(
    nodes: Sequence[Node], landings: Sequence[Landing], sources: Mapping[str, Source]
) -> Iterator[ModuleTrace]:
    """One trace a module that has a storage which is `programmed`; marks those that join them.

    Raises:
        ComputedValueError: a value that lands is made by what cannot be run again, or is read from
            another module.
    """
    trace = _Trace(nodes, landings, sources)
    for module, storages in trace.roots.items():
        own = None
        while own is None:
            own = trace.of_module(storages)
        yield ModuleTrace(module, tuple(storages), own)


class _Trace:
    """All nodes by the moment at which the loader did them, and who writes what."""

    def __init__(
        self, nodes: Sequence[Node], landings: Sequence[Landing], sources: Mapping[str, Source]
    ) -> None:
        self.roots: dict[str, dict[DestinationStorage, None]] = {}
        self._nodes = nodes
        self._sources = sources
        self._landed: dict[DestinationStorage, list[tuple[_Moment, Landing]]] = defaultdict(list)
        self._writers: dict[Any, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            for origin in (*node.results, *(view.origin for view in node.writes)):
                if origin is not None:
                    self._writers[origin].append(number)
                if type(origin) is DestinationStorage and origin.programmed:
                    self.roots.setdefault(origin.module, {})[origin] = None
        if self.roots:
            for number, landing in enumerate(landings):
                moment = landing.after, 0, number
                self._landed[landing.storage].append((moment, landing))

    def of_module(self, storages: dict[DestinationStorage, None]) -> tuple[Node, ...] | None:
        """The nodes that ``storages`` need, or None when these grew by one that is read."""
        found: dict[_Moment, Node] = {}
        lands_in: dict[int, DestinationStorage] = {}
        latest_first: list[int] = []
        seen: set[Computed] = set()

        def need(numbers: Iterable[int], storage: DestinationStorage) -> None:
            for number in numbers:
                if number not in lands_in:
                    lands_in[number] = storage
                    heappush(latest_first, -number)

        for storage in storages:
            storage.programmed = True
            for moment, landing in self._landed[storage]:
                found[moment] = _landing_node(landing, self._sources)
            need(self._writers[storage], storage)
        while latest_first:
            number = -heappop(latest_first)
            node, storage = self._nodes[number], lands_in[number]
            found[number, 1, 0] = node
            _check(node, storage)
            for view in node.views():
                origin = view.origin
                if type(origin) is DestinationStorage and origin not in storages:
                    storages[origin] = None
                    return None
                if type(origin) is Computed and origin not in seen:
                    seen.add(origin)
                    need((at for at in self._writers[origin] if at < number), storage)
        return tuple(found[moment] for moment in sorted(found))


def _check(node: Node, lands_in: DestinationStorage) -> None:
    """Refuses what cannot be run again."""
    problem, kind = node.problem, ComputedValueError
    for view in node.views():
        origin = view.origin
        if isinstance(origin, Brought) and origin.is_lost:
            problem = (
                f"{node.op} takes a tensor that the loader made on the meta device, where values "
                "are lost; make it on the CPU"
            )
            kind = LostValueError
        if type(origin) is DestinationStorage and origin.module != lands_in.module:
            named = origin.destinations[0]
            problem = (
                f"{node.op} reads the model's own {named.module}.{named.param}, and what lands in "
                f"module {lands_in.module!r} is computed without others; compute from weights"
            )
    if problem is not None:
        raise kind(
            problem,
            weight=node.weight,
            op=str(node.op),
            where=node.where,
            module=lands_in.module,
            param=lands_in.destinations[0].param,
        )


def _landing_node(landing: Landing, sources: Mapping[str, Source]) -> Node:
    """The plain copy or fill as a node."""
    into = View(landing.storage, landing.dtype, landing.offset, landing.shape, landing.stride)
    if landing.value is not None:
        args: tuple[Any, ...] = (into, landing.value)
        op = _aten.fill_.Scalar
    else:
        assert landing.weight is not None
        args = (
            into,
            View(
                sources[landing.weight],
                landing.source_dtype,
                landing.source_offset,
                landing.shape,
                landing.source_stride,
            ),
        )
        op = _aten.copy_.default
    return Node(op, args, {}, (), (into,), "", landing.weight)
