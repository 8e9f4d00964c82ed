"""Weight sources: what a trainer must offer so that its weights can be served.

`WeightSource` has the shape of vLLM 0.33's class of that name, and `adapt` also takes the shape
of 0.32's, so sources written for either work here; neither is imported.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from rdt_plan import AxisPlacement
from rdt_plan.manifest import ParamMeta
from rdt_trainer.errors import SourceError
from rdt_trainer.held_names import Exchange, held_owners
from rdt_trainer.placements import axis_placements

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


@dataclass(frozen=True, slots=True)
class SourceMeta:
    """One parameter a source declares.

    Attributes:
        name: its checkpoint name.
        dtype: what the source yields it as.
        shape: its full shape.
        owners: trainer ranks that yield it; None means every rank. In row-major order of their
            mesh, if they form one.
        mesh_shape: of a `LocalWeightSource`: the mesh that cuts it; ``()`` where every owner has
            it whole.
        placements: what each axis of the mesh does to it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[AxisPlacement, ...] = ()


class WeightSource(Protocol):
    """A trainer's weights: what they are, and passes over them.

    ``metadata`` lists every parameter of the whole model, equally on every rank, in an order
    that keeps gather groups together (`rdt_plan.groups.group_ordered`); each entry has ``name``,
    ``dtype`` (a torch dtype or its name), ``shape`` and optionally ``owners``.

    vLLM's sources implement ``iter_full``, ``iter_local`` (see `LocalWeightSource`) or both; of
    both, ``iter_full`` is what is served. What a source may have beside it is `StableTensors`.
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
        """By checkpoint name, what every pass yields.

        Of names of which this rank holds something: contiguous, on one device, and with one
        address, shape, dtype and strides for as long as the source is served. Only contents change,
        and never during `RdtTrainer.send_weights`. Asked once, when the trainer is initialised.
        """
        ...


class StablePasses(StableTensors, Protocol):
    """A source whose stable tensors are in no pass: a sync takes no step for each of them.

    A class that overrides ``iter_full``, or ``iter_local`` of a `LocalWeightSource`, and inherits
    `iter_rest` counts as a `StableTensors`. One whose stable tensors are copies may also have
    ``fill_stable_tensors()``, which is called as every sync begins, before they are read.
    """

    def stable_tensors(self) -> Mapping[str, torch.Tensor]:
        """As of `StableTensors`, of the same names each time; asked again as every sync begins.

        Returning the very mapping of the last time says that they are still those tensors at those
        addresses, which are then not looked at one by one.
        """
        ...

    def iter_rest(self, stable: Collection[str]) -> NamedTensors:
        """A pass, without the names of what `stable_tensors` just returned."""
        ...


class LocalWeightSource(Protocol):
    """A trainer's weights in pieces: each rank yields what it holds, and nothing is gathered.

    Entries of ``metadata`` also have ``mesh_shape`` and ``placements`` where owners hold pieces:
    one placement an axis of their mesh, as `AxisPlacement`, or as ``Replicate`` and ``Shard`` of
    torch or vLLM. Pieces are cut as ``torch.chunk`` cuts, along outer axes of the mesh first.
    """

    @property
    def metadata(self) -> Sequence[Any]: ...

    def iter_local(self) -> NamedTensors:
        """A fresh pass: this rank's piece of each parameter it owns, in metadata order.

        Empty pieces may be left out. Other than that as `WeightSource.iter_full`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdaptedSource:
    """Any accepted source, in the words of ``rdt_plan``.

    Attributes:
        params: the whole model in source order, owners explicit.
        new_pass: starts a pass over what this rank holds.
        stable: the tensors that stay where they are, by name.
        passes: the source itself, if its passes may do without these.
        fill: brings the contents of these up to date, if that takes anything.
    """

    params: tuple[ParamMeta, ...]
    new_pass: Callable[[], NamedTensors]
    stable: Mapping[str, torch.Tensor]
    passes: StablePasses | None = None
    fill: Callable[[], None] | None = None


def adapt(
    source: Any, *, rank: int = 0, num_producers: int = 1, exchange: Exchange | None = None
) -> AdaptedSource:
    """Take a `WeightSource`, a `LocalWeightSource`, or a source in the shape of vLLM 0.32's.

    The older shape has ``metadata()``, ``__iter__`` (None for a name this rank does not hold) and
    ``held_names()``, which speaks of this rank alone: what the others hold is learnt by
    ``exchange`` (this rank's names in, every rank's names out, by rank), a collective that
    defaults to ``torch.distributed``'s where that spans the producers.

    Raises:
        SourceError: it has neither shape, or its description is inconsistent.
        RankFailedError: another rank's did not get as far as the default exchange.
    """
    declared = cache(lambda: _declared(source, rank))
    for method in ("iter_full", "iter_local"):
        if _implements(source, method):
            is_local = method == "iter_local"
            params = tuple(_param(meta, num_producers, is_local=is_local) for meta in declared())
            stable = _stable(source, params, rank)
            passes = source if stable and _has_own_rest(source, method) else None
            fill = getattr(passes, "fill_stable_tensors", None)
            return AdaptedSource(params, getattr(source, method), stable, passes, fill)
    if hasattr(source, "__iter__"):
        owners = held_owners(source, declared, rank, num_producers, exchange)
        params = tuple(_param(meta, num_producers, owners) for meta in declared())
        return AdaptedSource(params, lambda: _held_only(source), _stable(source, params, rank))
    declared()  # what has not even that is told so first
    raise SourceError(
        f"rank {rank}: {type(source).__name__} implements neither iter_full nor iter_local: "
        "expected an iterator of (name, tensor) pairs, whole tensors or this rank's pieces; wrap "
        "a torch module in ModuleSource or ShardedModuleSource"
    )


def _stable(source: Any, params: Iterable[ParamMeta], rank: int) -> Mapping[str, torch.Tensor]:
    declared = getattr(source, "stable_tensors", None)
    tensors = declared() if callable(declared) else {}
    held = {param.name for param in params if param.held_by(rank) is not None}
    if unknown := tensors.keys() - held:
        raise SourceError(
            f"rank {rank}: stable_tensors() has {min(unknown)}, of which this rank holds nothing: "
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


def _implements(source: Any, method: str) -> bool:
    if not callable(getattr(source, method, None)):
        return False
    implements = getattr(source, f"implements_{method}", None)
    return bool(implements()) if callable(implements) else True


def _has_own_rest(source: Any, method: str) -> bool:
    """Whether ``iter_rest`` was written for this ``iter_full`` or ``iter_local``.

    Not where a class below overrides only that: its passes would be left out without a word.
    """
    for each in (source, *type(source).__mro__):
        defined = getattr(each, "__dict__", {})
        if "iter_rest" in defined:
            return callable(defined["iter_rest"])
        if method in defined:
            return False
    return False


def _held_only(source: Iterable[tuple[str, torch.Tensor | None]]) -> NamedTensors:
    return ((name, tensor) for name, tensor in source if tensor is not None)


def _param(
    meta: Any,
    num_producers: int,
    held: dict[str, tuple[int, ...]] | None = None,
    *,
    is_local: bool = False,
) -> ParamMeta:
    """Convert one entry; where passes yield whole tensors, a mesh of their owners is dropped."""
    owners = held[meta.name] if held is not None else getattr(meta, "owners", None)
    if owners is None:
        owners = range(num_producers)
    if not owners:
        raise SourceError(
            f"{meta.name}: no producer holds it: expected at least one owner of {num_producers}; "
            "declare its owners in metadata, list it in held_names() of a rank, or leave it out"
        )
    if min(owners) < 0 or max(owners) >= num_producers:
        raise SourceError(
            f"{meta.name}: owners {tuple(owners)} are not all among the {num_producers} producers: "
            f"expected ranks 0 to {num_producers - 1}; set JobSettings.num_producers to the "
            "number of ranks"
        )
    dtype = str(meta.dtype).removeprefix("torch.")
    shape = tuple(int(extent) for extent in meta.shape)
    found = getattr(meta, "placements", None) if is_local else None
    placements = axis_placements(meta.name, found or (), len(shape))
    if all(text == "replicate" for text in placements):
        return ParamMeta(meta.name, dtype, shape, tuple(sorted(owners)))
    mesh_shape = tuple(getattr(meta, "mesh_shape", None) or (len(owners),))
    return ParamMeta(meta.name, dtype, shape, tuple(owners), mesh_shape, placements)
