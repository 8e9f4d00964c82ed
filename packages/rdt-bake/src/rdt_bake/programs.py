"""The programs of a recording, and what they leave unwritten."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rdt_bake.assembly import assembled
from rdt_bake.destinations import Destination, DestinationStorage
from rdt_bake.effects import is_whole_write, old_values, written_part
from rdt_bake.errors import DataDependentError
from rdt_bake.landings import Landing, region_of
from rdt_bake.lowering import lowered
from rdt_bake.narrowing import narrowed
from rdt_bake.nodes import Node
from rdt_bake.origins import Source, View
from rdt_bake.overlaps import missing_regions
from rdt_bake.regions import Region
from rdt_bake.slicing import module_traces
from rdt_plan.program import Program

__all__ = ["Exempt", "Missing", "Programs", "cut_programs"]

Exempt = Callable[[str, str], bool]
Missing = tuple[Destination, tuple[Region, ...], int]


@dataclass(frozen=True, slots=True)
class Programs:
    """Attributes:
    programs: one a module that needs one.
    missing: per parameter that they write, the disjoint regions that nothing writes, and the bytes
        of their unit.
    """

    programs: tuple[Program, ...]
    missing: tuple[Missing, ...]


def cut_programs(
    nodes: Sequence[Node],
    landings: Sequence[Landing],
    sources: Mapping[str, Source],
    exempt: Exempt,
) -> Programs:
    """Cuts the trace into one program a module; marks the storages that they write.

    Raises:
        ComputedValueError: a value that lands cannot be computed again.
        DataDependentError: a value comes from what a parameter held before the load.
        UnsupportedTensorError: a write lies in no single tensor of its module.
    """
    programs, missing = [], []
    for trace in module_traces(nodes, landings, sources):
        plain = lowered(trace.nodes, sources)
        for storage in trace.storages:
            missing += _unwritten(storage, plain, exempt)
        programs.append(assembled(trace, narrowed(plain)))
    return Programs(tuple(programs), tuple(missing))


def _unwritten(storage: DestinationStorage, nodes: Sequence[Node], exempt: Exempt) -> list[Missing]:
    """What is never written; refuses a read of anything that is not written yet."""
    destinations = [d for d in storage.destinations if 0 not in d.shape]
    touching = [n for n in nodes if any(view.origin is storage for view in n.views())]
    items = {d.dtype.itemsize for d in destinations}
    items |= {v.dtype.itemsize for n in touching for v in n.views() if v.origin is storage}
    unit = items.pop() if len(items) == 1 else 1

    def region(view: View) -> Region:
        return region_of(view.dtype, view.offset, view.shape, view.stride, unit)

    may_read = all(exempt(d.module, d.param) for d in storage.destinations)
    written: dict[Region, None] = {}  # in order, each once
    for node in touching:
        old = old_values(node)
        read = [view for view in node.views() if not any(view is each for each in node.writes)]
        for view in (*read, *old):
            if may_read or view.origin is not storage or 0 in view.shape:
                continue
            if _lacks(written, region(view)):
                _refuse_old(node, storage)
        for view in node.writes:
            if view.origin is not storage or 0 in view.shape:
                continue
            if is_whole_write(node):
                written[region(view)] = None
            elif (part := written_part(node)) is not None:
                written.update((region(each), None) for each in part)
    wanted = [d for d in destinations if d.kind == "parameter"]
    inside = [region_of(d.dtype, d.offset, d.shape, d.stride, unit) for d in wanted]
    missing = missing_regions(list(written), inside)
    return list(zip(wanted, missing, [unit] * len(wanted), strict=True))


def _lacks(written: Mapping[Region, None], read: Region) -> bool:
    """Whether any of ``read`` is not written."""
    if read in written:
        return False
    near = [each for each in written if each.offset < read.stop and read.offset < each.stop]
    return any(missing_regions(near, [read]))


def _refuse_old(node: Node, storage: DestinationStorage) -> None:
    named = storage.destinations[0]
    raise DataDependentError(
        f"{node.op} needs values that it held before the load, and every update finds others "
        "there; write it from weights first, or exempt it",
        weight=node.weight,
        op=str(node.op),
        where=node.where or None,
        module=named.module,
        param=named.param,
    )
