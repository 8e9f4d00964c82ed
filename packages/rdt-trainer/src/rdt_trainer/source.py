"""Weight sources: what a trainer must offer so that its weights can be served.

`WeightSource` has the shape of vLLM 0.33's class of that name, and `adapt` also takes the shape
of 0.32's, so sources written for either work here; neither is imported.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rdt_plan.manifest import ParamMeta
from rdt_trainer.errors import SourceError

__all__ = ["AdaptedSource", "SourceMeta", "WeightSource", "adapt"]

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
    """

    @property
    def metadata(self) -> Sequence[Any]: ...

    def iter_full(self) -> NamedTensors:
        """A fresh pass: each parameter this rank owns, whole, in metadata order.

        May run collectives among a parameter's owners; called on the thread that calls
        `RdtTrainer.send_weights`. Tensors must stay unchanged until that returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdaptedSource:
    """Any accepted source, in the words of ``rdt_plan``.

    Attributes:
        params: the whole model in source order, owners explicit.
        iter_full: starts a pass over what this rank owns.
    """

    params: tuple[ParamMeta, ...]
    iter_full: Callable[[], NamedTensors]


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
    """
    kind = type(source).__name__
    declared = getattr(source, "metadata", None)
    if declared is None:
        raise SourceError(
            f"rank {rank}: {kind} has no metadata: expected a WeightSource (metadata, iter_full); "
            "wrap a torch module in ModuleSource"
        )
    metas = list(declared() if callable(declared) else declared)
    if not metas:
        raise SourceError(f"rank {rank}: {kind}.metadata is empty: there is nothing to serve")
    if _implements_iter_full(source):
        params = tuple(_param(meta, num_producers) for meta in metas)
        return AdaptedSource(params, source.iter_full)
    if hasattr(source, "__iter__"):
        owners = _held_owners(source, metas, rank, num_producers, exchange)
        params = tuple(_param(meta, num_producers, owners) for meta in metas)
        return AdaptedSource(params, lambda: _held_only(source))
    only_local = " (it yields local pieces only, which are not served yet)"
    raise SourceError(
        f"rank {rank}: {kind} does not implement iter_full"
        f"{only_local if hasattr(source, 'iter_local') else ''}: expected an iterator of whole "
        "(name, tensor) pairs; gather sharded parameters in iter_full, as ModuleSource does"
    )


def _implements_iter_full(source: Any) -> bool:
    if not callable(getattr(source, "iter_full", None)):
        return False
    implements = getattr(source, "implements_iter_full", None)
    return bool(implements()) if callable(implements) else True


def _held_only(source: Iterable[tuple[str, torch.Tensor | None]]) -> NamedTensors:
    return ((name, tensor) for name, tensor in source if tensor is not None)


def _held_owners(
    source: Any, metas: Sequence[Any], rank: int, num_producers: int, exchange: Exchange | None
) -> dict[str, tuple[int, ...]] | None:
    held_names = getattr(source, "held_names", None)
    if num_producers == 1 or not callable(held_names):
        return None
    held = held_names()
    mine = [meta.name for meta in metas] if held is None else sorted(held)
    everyone = (exchange or _exchange_by_torch(rank, num_producers))(mine)
    if len(everyone) != num_producers:
        raise SourceError(
            f"rank {rank}: the exchange of held names returned {len(everyone)} ranks: expected "
            f"{num_producers}, one entry for each producer"
        )
    by_rank = [frozenset(names) for names in everyone]
    return {
        meta.name: tuple(owner for owner, names in enumerate(by_rank) if meta.name in names)
        for meta in metas
    }


def _exchange_by_torch(rank: int, num_producers: int) -> Exchange:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        found = "torch.distributed is not initialised"
    elif (world_size := distributed.get_world_size()) != num_producers:
        found = f"torch.distributed spans {world_size} ranks, not the {num_producers} producers"
    else:

        def gather(names: list[str]) -> list[list[str]]:
            everyone: list[list[str]] = [[] for _ in range(num_producers)]
            distributed.all_gather_object(everyone, names)
            return everyone

        return gather
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
        raise SourceError(f"{meta.name}: no producer holds it: expected at least one owner")
    found = tuple(sorted(owners))
    if found[0] < 0 or found[-1] >= num_producers:
        raise SourceError(
            f"{meta.name}: owners {found} are not all among the {num_producers} producers: "
            f"expected ranks 0 to {num_producers - 1}; set JobSettings.num_producers to the "
            "number of ranks"
        )
    dtype = str(meta.dtype).removeprefix("torch.")
    return ParamMeta(meta.name, dtype, tuple(int(extent) for extent in meta.shape), found)
