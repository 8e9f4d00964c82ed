"""Recording a model's own weight loaders, once, without any weight."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from rdt_bake.coverage import uncovered, whole
from rdt_bake.destinations import DestinationStorage
from rdt_bake.errors import DataDependentError, RdtBakeError, RebindError, RecordError
from rdt_bake.frames import raising_line
from rdt_bake.landings import Landing, settled_writes
from rdt_bake.ledger import Ledger
from rdt_bake.lost_values import LostValueError, LostValues
from rdt_bake.programs import Exempt, Missing, cut_programs
from rdt_bake.rebinding import land_rebinds
from rdt_bake.recorder import Recorder
from rdt_bake.recording import Recording, Uncovered
from rdt_bake.tensors import geometry
from rdt_bake.twins import MetaTwins
from rdt_plan import ParamMeta, Write
from rdt_plan.collector import collector_paused

__all__ = ["no_exemption", "record"]

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]


def no_exemption(module: str, param: str) -> bool:
    """The default of ``exempt``: every parameter must be written wholly."""
    return False


def record(
    model: nn.Module,
    load_weights: LoadWeights,
    params: Sequence[ParamMeta],
    *,
    exempt: Exempt = no_exemption,
) -> Recording:
    """Runs ``load_weights`` once over meta tensors and says where every weight lands.

    The model is left exactly as it was found, also when this raises: the same tensors, loaders,
    attributes and hooks, and the same contents of dicts, lists, sets and deques at any depth. Not
    covered are what objects of any other class hold (``model.helper.count``), and the values of
    tensors that are no parameter, buffer or attribute of a module of the model, nor an item of
    one that is a list, tuple or dict: what a loader writes there stays. Call it on the thread that
    may use the model, with no forward in flight and no ``torch.device`` context active (that slows
    every operation of the load); a loader must use tensors on this thread alone. The garbage
    collector of the process is paused meanwhile. A loader that indexes weights by lists, moves them
    to the CPU, or copies them into CPU tensors of its own, runs twice.

    Args:
        model: its tensors may be real or on meta.
        load_weights: takes (name, tensor) pairs, as ``model.load_weights`` does. A generator it
            returns is run to its end.
        params: the sources, in the order in which they are handed out; names are unique.
        exempt: called with (module path, parameter name); true for parameters that the loaders
            never write, in whole or in part.

    Raises:
        ComputedValueError: a value lands in the model that cannot be computed again.
        DataDependentError: the loader asks for a value, or uses one of before the load.
        RebindError: the loader replaces a tensor by one that is no region of a source.
        OverlapError: writes overlap in a way that depends on their order.
        UnsupportedTensorError: sparse, conjugated, negated or foreign tensors.
    """
    with collector_paused():  # it would walk the whole engine's heap for each few objects
        try:
            return _recorded(model, load_weights, params, exempt)
        except LostValueError:
            return _recorded(model, load_weights, params, exempt, LostValues)


def _recorded(
    model: nn.Module,
    load_weights: LoadWeights,
    params: Sequence[ParamMeta],
    exempt: Exempt,
    around: Callable[[Ledger], AbstractContextManager[Any]] = nullcontext,
) -> Recording:
    with MetaTwins(model) as twins:
        sources = _sources(params)
        ledger = Ledger(twins)
        for meta in params:
            ledger.add_source(meta, sources[meta.name])
        with around(ledger):
            _load(load_weights, sources, ledger)
        land_rebinds(model, twins, ledger)
        cut = cut_programs(ledger.nodes, ledger.landings, ledger.sources, exempt)
        writes, lacking = _settle(ledger.landings, twins, cut.missing)
    for program in cut.programs:
        ledger.consumed.update(slice_.name for _, slice_ in program.inputs)
    return Recording(
        writes=writes,
        programs=cut.programs,
        consumed=frozenset(ledger.consumed),
        ignored=tuple(name for name in ledger.sources if name not in ledger.consumed),
        aliases=_aliases(twins),
        uncovered=tuple(each for each in lacking if not exempt(each.module, each.param)),
    )


def _sources(params: Sequence[ParamMeta]) -> dict[str, Tensor]:
    sources: dict[str, Tensor] = {}
    for meta in params:
        if meta.name in sources:
            raise RecordError("it is listed twice", weight=meta.name)
        dtype = getattr(torch, meta.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise RecordError(f"torch has no dtype {meta.dtype!r}", weight=meta.name)
        sources[meta.name] = torch.empty(meta.shape, dtype=dtype, device="meta")
    return sources


def _load(load_weights: LoadWeights, sources: dict[str, Tensor], ledger: Ledger) -> None:
    def hand_out() -> Iterator[tuple[str, Tensor]]:
        for name in ledger.sources:
            ledger.current = name
            yield name, sources.pop(name)  # only its storage is needed afterwards

    try:
        with Recorder(ledger):
            result = load_weights(hand_out())
            if isinstance(result, GeneratorType):
                for _ in result:
                    pass
    except RdtBakeError:
        raise
    except Exception as error:
        if ledger.refusal is not None:
            raise ledger.refusal from error
        translated = _translated(error, ledger)
        if translated is None:
            raise
        raise translated from error
    if ledger.refusal is not None:
        raise ledger.refusal  # the loader swallowed it and went on without the value


def _translated(error: Exception, ledger: Ledger) -> RecordError | None:
    """Ours for an error by which torch refuses, before any mode sees it, what has no meaning here.

    The loader's own errors stay, with a note.
    """
    if "set_data" in str(error):
        message = f"the loader gives a parameter memory that comes from no weight: {error}"
        return RebindError(message, weight=ledger.current, where=raising_line(error))
    if "meta device" in str(error):  # numpy(), say
        message = f"the loader asks for a value, and a recording has none: {error}"
        return DataDependentError(message, weight=ledger.current, where=raising_line(error))
    error.add_note(f"while recording the loader of weight {ledger.current!r}")
    return None


def _settle(
    landings: Sequence[Landing], twins: MetaTwins, computed: Sequence[Missing]
) -> tuple[tuple[Write, ...], list[Uncovered]]:
    by_storage: dict[DestinationStorage, list[tuple[int, Landing]]] = {
        destination.storage: []
        for destination in twins.destinations
        if not destination.storage.programmed
    }
    for number, landing in enumerate(landings):
        if not landing.storage.programmed:
            by_storage[landing.storage].append((number, landing))
    numbered: list[tuple[int, Write]] = []
    missing = list(computed)
    for storage, own in by_storage.items():
        writes, lacks = settled_writes(storage, own)
        numbered += writes
        missing += lacks
    lacking: dict[tuple[str, str], Uncovered] = {}
    for destination, regions, unit_bytes in missing:
        found = uncovered(destination, regions, unit_bytes)
        if found is not None:
            lacking[destination.places[0]] = found
    numbered.sort(key=lambda each: each[0])
    in_order = [lacking[d.places[0]] for d in twins.destinations if d.places[0] in lacking]
    in_order += [whole(place) for place, _ in twins.foreign.values() if place.kind == "parameter"]
    return tuple(write for _, write in numbered), in_order


def _aliases(twins: MetaTwins) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Places of one tensor, or of tensors that are the same memory seen the same way."""
    groups: dict[Any, list[tuple[str, str]]] = {}
    for destination in twins.destinations:
        if 0 not in destination.shape:
            groups.setdefault(geometry(destination.tensor), []).extend(destination.places)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
