"""Weight sources: what a trainer must offer so that its weights can be served.

`WeightSource` has the shape of vLLM 0.33's class of that name, and `adapt` also takes the shape
of 0.32's, so sources written for either work here; neither is imported.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from rdt_plan.manifest import ParamMeta
from rdt_trainer.errors import SourceError
from rdt_trainer.ranks import gather_from_ranks, group_size

__all__ = [
    "AdaptedSource",
    "LocalWeightSource",
    "SourceMeta",
    "StablePasses",
    "StableTensors",
    "WeightSource",
    "adapt",
]

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Exchange = Callable[[list[str]], Sequence[Collection[str]]]


@dataclass(frozen=True, slots=True)
class SourceMeta:
    """One parameter a source declares.

    Attributes:
        name: its checkpoint name.
        dtype: what `WeightSource.iter_full` yields it as.
        shape: its full shape.
        owners: trainer ranks that yield it; None means every rank.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class WeightSource(Protocol):
    """A trainer's weights: what they are, and passes over them.

    ``metadata`` lists every parameter of the whole model, equally on every rank, in an order
    that keeps gather groups together (`rdt_plan.groups.group_ordered`); each entry has ``name``,
    ``dtype`` (a torch dtype or its name), ``shape`` and optionally ``owners``.

    vLLM's sources implement ``iter_full``, ``iter_local`` or both; here ``iter_full`` is required,
    see `LocalWeightSource`. What a source may have beside it is `StableTensors`.
    """

    @property
    def metadata(self) -> Sequence[Any]: ...

    def iter_full(self) -> NamedTensors:
        """A fresh pass: each parameter this rank owns, whole, in metadata order.

        May run collectives among a parameter's owners; called on the thread that calls
        `RdtTrainer.send_weights`, whose current stream fills them. Tensors are all on the device
        that the trainer serves from, and must stay unchanged until that returns.
        """
        ...


class StableTensors(Protocol):
    """A source, some tensors of which stay where they are: workers may read them without a copy."""

    def stable_tensors(self) -> Mapping[str, torch.Tensor]:
        """By checkpoint name, what `WeightSource.iter_full` yields in every pass.

        Of names that this rank owns: contiguous, on one device, and with one address, shape, dtype
        and strides for as long as the source is served. Only contents change, and never during
        `RdtTrainer.send_weights`. Asked once, when the trainer is initialised.
        """
        ...


class StablePasses(StableTensors, Protocol):
    """A source whose stable tensors are in no pass: a sync takes no step for each of them.

    A class that overrides ``iter_full`` and inherits `iter_rest` counts as a `StableTensors`.
    """

    def stable_tensors(self) -> Mapping[str, torch.Tensor]:
        """As of `StableTensors`, of the same names each time; asked again as every sync begins.

        Returning the very mapping of the last time says that they are still those tensors at those
        addresses, which are then not looked at one by one.
        """
        ...

    def iter_rest(self, stable: Collection[str]) -> NamedTensors:
        """As `WeightSource.iter_full`, without the names of what `stable_tensors` just returned."""
        ...


class LocalWeightSource(Protocol):
    """A source that yields each rank's pieces of sharded parameters: not served yet.

    `adapt` and `RdtTrainer.init` refuse one that has no ``iter_full`` beside ``iter_local``; where
    it has both, ``iter_full`` is what is served.
    """

    @property
    def metadata(self) -> Sequence[Any]: ...

    def iter_local(self) -> NamedTensors:
        """A fresh pass: this rank's piece of each parameter it owns, in metadata order."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedSource:
    """Any accepted source, in the words of ``rdt_plan``.

    Attributes:
        params: the whole model in source order, owners explicit.
        iter_full: starts a pass over what this rank owns.
        stable: the tensors that stay where they are, by name.
        passes: the source itself, if its passes may do without these.
    """

    params: tuple[ParamMeta, ...]
    iter_full: Callable[[], NamedTensors]
    stable: Mapping[str, torch.Tensor]
    passes: StablePasses | None = None


def adapt(
    source: Any, *, rank: int = 0, num_producers: int = 1, exchange: Exchange | None = None
) -> AdaptedSource:
    """Take a `WeightSource`, or a source in the shape of vLLM 0.32's.

    The older shape has ``metadata()``, ``__iter__`` (None for a name this rank does not hold) and
    ``held_names()``, which speaks of this rank alone: what the others hold is learnt by
    ``exchange`` (this rank's names in, every rank's names out, by rank), a collective that
    defaults to ``torch.distributed``'s where that spans the producers.

    Raises:
        SourceError: it has neither shape, or its description is inconsistent.
        RankFailedError: another rank's did not get as far as the default exchange.
    """
    declared = cache(lambda: _declared(source, rank))
    if _implements_iter_full(source):
        params = tuple(_param(meta, num_producers) for meta in declared())
        stable = _stable(source, params, rank)
        passes = source if stable and _has_own_rest(source) else None
        return AdaptedSource(params, source.iter_full, stable, passes)
    if hasattr(source, "__iter__"):
        owners = _held_owners(source, declared, rank, num_producers, exchange)
        params = tuple(_param(meta, num_producers, owners) for meta in declared())
        return AdaptedSource(params, lambda: _held_only(source), _stable(source, params, rank))
    declared()  # what has not even that is told so first
    only_local = " (it yields local pieces only, which are not served yet)"
    raise SourceError(
        f"rank {rank}: {type(source).__name__} does not implement iter_full"
        f"{only_local if hasattr(source, 'iter_local') else ''}: expected an iterator of whole "
        "(name, tensor) pairs; gather sharded parameters in iter_full, as ModuleSource does"
    )


def _stable(source: Any, params: Iterable[ParamMeta], rank: int) -> Mapping[str, torch.Tensor]:
    declared = getattr(source, "stable_tensors", None)
    tensors = declared() if callable(declared) else {}
    owned = {param.name for param in params if rank in param.owners}
    if unknown := tensors.keys() - owned:
        raise SourceError(
            f"rank {rank}: stable_tensors() has {min(unknown)}, which this rank does not own: "
            "expected names of metadata with this rank among their owners; leave it out"
        )
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_contiguous():
            raise SourceError(
                f"rank {rank}: stable_tensors() has a {type(tensor).__name__} for {name}: expected "
                "a plain, contiguous tensor; leave it out"
            )
    return tensors


def _declared(source: Any, rank: int) -> Sequence[Any]:
    kind = type(source).__name__
    declared = getattr(source, "metadata", None)
    if declared is None:
        raise SourceError(
            f"rank {rank}: {kind} has no metadata: expected a WeightSource (metadata, iter_full); "
            "wrap a torch module in ModuleSource"
        )
    metas = tuple(declared() if callable(declared) else declared)
    if not metas:
        raise SourceError(f"rank {rank}: {kind}.metadata is empty: there is nothing to serve")
    return metas


def _implements_iter_full(source: Any) -> bool:
    if not callable(getattr(source, "iter_full", None)):
        return False
    implements = getattr(source, "implements_iter_full", None)
    return bool(implements()) if callable(implements) else True


def _has_own_rest(source: Any) -> bool:
    """Whether ``iter_rest`` was written for this ``iter_full``.

    Not where a class below overrides only that: its passes would be left out without a word.
    """
    for each in (source, *type(source).__mro__):
        defined = getattr(each, "__dict__", {})
        if "iter_rest" in defined:
            return callable(defined["iter_rest"])
        if "iter_full" in defined:
            return False
    return False


def _held_only(source: Iterable[tuple[str, torch.Tensor | None]]) -> NamedTensors:
    return ((name, tensor) for name, tensor in source if tensor is not None)


def _held_owners(
    source: Any,
    declared: Callable[[], Sequence[Any]],
    rank: int,
    num_producers: int,
    exchange: Exchange | None,
) -> dict[str, tuple[int, ...]] | None:
    held_names = getattr(source, "held_names", None)
    if num_producers == 1 or not callable(held_names):
        return None

    def mine() -> list[str]:
        metas, held = declared(), held_names()
        return [meta.name for meta in metas] if held is None else sorted(held)

    if exchange is not None:
        everyone = exchange(mine())
    else:
        _check_exchange(rank, num_producers)
        everyone = gather_from_ranks(mine)
    if len(everyone) != num_producers:
        raise SourceError(
            f"rank {rank}: the exchange of held names returned {len(everyone)} ranks: expected "
            f"{num_producers}, one entry for each producer"
        )
    by_rank = [frozenset(names) for names in everyone]
    return {
        meta.name: tuple(owner for owner, names in enumerate(by_rank) if meta.name in names)
        for meta in declared()
    }


def _check_exchange(rank: int, num_producers: int) -> None:
    world_size = group_size()
    if world_size == num_producers:
        return
    found = "torch.distributed is not initialised"
    if world_size is not None:
        found = f"torch.distributed spans {world_size} ranks, not the {num_producers} producers"
    raise SourceError(
        f"rank {rank}: held_names() tells what this rank holds, but not what the others hold, and "
        f"{found}: pass exchange=, or declare owners in metadata"
    )


def _param(
    meta: Any, num_producers: int, held: dict[str, tuple[int, ...]] | None = None
) -> ParamMeta:
    """Convert one entry; a pass yields whole tensors, so any mesh an owner set forms is dropped."""
    owners = held[meta.name] if held is not None else getattr(meta, "owners", None)
    if owners is None:
        owners = range(num_producers)
    if not owners:
        raise SourceError(
            f"{meta.name}: no producer holds it: expected at least one owner of {num_producers}; "
            "declare its owners in metadata, list it in held_names() of a rank, or leave it out"
        )
    found = tuple(sorted(owners))
    if found[0] < 0 or found[-1] >= num_producers:
        raise SourceError(
            f"{meta.name}: owners {found} are not all among the {num_producers} producers: "
            f"expected ranks 0 to {num_producers - 1}; set JobSettings.num_producers to the "
            "number of ranks"
        )
    dtype = str(meta.dtype).removeprefix("torch.")
    return ParamMeta(meta.name, dtype, tuple(int(extent) for extent in meta.shape), found)
