"""A torch module as a weight source."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import torch
from torch import nn

from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SourceError
from rdt_trainer.module_snapshot import ModuleSnapshot
from rdt_trainer.module_tensors import module_tensors
from rdt_trainer.named_views import NamedView, Region, regions
from rdt_trainer.served import Served, Whole, is_member, mesh_ranks
from rdt_trainer.source import SourceMeta

__all__ = ["ModuleSource", "Named", "Names"]

# What a tensor of the module is in a checkpoint: one name, parts with names of their own, nothing.
Named = str | Sequence[NamedView] | None
Names = Callable[[str], Named] | Mapping[str, Named]

_logger = logging.getLogger(__name__)


class ModuleSource:
    """Serves the parameters of any ``nn.Module``, frozen ones included; a `WeightSource`.

    Names lose the segments that wrappers add (``torch.compile``, FSDP, activation checkpointing,
    ``DistributedDataParallel``). Tied parameters appear once, under the first of their names. Each
    pass yields tensors detached, contiguous and whole: the ranks of a ``DTensor``'s mesh gather it
    together (FSDP2, tensor parallelism), one parameter at a time, in metadata order. The mesh's
    ranks are taken to be the trainer's ranks.

    Args:
        module: read again in every pass. Its parameters may neither be renamed nor reshaped; see
            ``stable`` for those that are replaced.
        names: maps a tensor's name in the module to its checkpoint name; to a list of
            `NamedView`, which together hold every element once, where the checkpoint has it in
            parts; or to None to leave it out. A function, or a table that lists every tensor. A
            view that is contiguous is served from the parameter's own memory, any other is
            copied in every pass. A tensor is gathered once a pass, and kept until its last view
            is yielded: keep its views within one gather group.
        extra_names: further checkpoint names, each for one that is served already, such as
            ``{"lm_head.weight": "model.embed_tokens.weight"}`` where these are tied.
        dtype: serve floating-point parameters of 16 bits or more as this dtype, so fp32 masters
            as bf16; a parameter is cast when it is yielded, before any view. Or a function from
            checkpoint name to dtype, None for its own: for the few that the checkpoint keeps in
            fp32.
        persistent_buffers: serve these too.
        stable: whether parameters stay the tensors they are, as under an optimizer. Workers then
            read those that are served as they are from their own memory, and one that was replaced
            since the trainer was initialised is refused. False: each pass may find other tensors.

    Raises:
        SourceError: from ``metadata``, so while the trainer is initialised: names that collide,
            extra names of nothing, views that are none or leave elements out, adapters that are
            not merged, quantised parameters, FSDP1's flat ones, or tensors of several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        names: Names | None = None,
        extra_names: Mapping[str, str] | None = None,
        dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
        persistent_buffers: bool = False,
        stable: bool = True,
    ) -> None:
        self._module = module
        self._names = names
        self._extra_names = dict(extra_names or {})
        self._dtype = dtype
        self._persistent_buffers = persistent_buffers
        self._stable = stable
        self._snapshot: ModuleSnapshot | None = None
        self._walked: dict[str, torch.Tensor] = {}  # while the snapshot holds
        self._unchanged: Mapping[str, torch.Tensor] | None = None  # what was checked last
        self._stable_tensors: dict[str, torch.Tensor] | None = None  # of these
        self._described: frozenset[str] = frozenset()  # the tensors that `metadata` looked at

    @classmethod
    def of_transformers(
        cls,
        model: nn.Module,
        *,
        extra_names: Mapping[str, str] | None = None,
        dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
        stable: bool = True,
    ) -> Self:
        """Serves a ``transformers`` model, wrapped or not, as its ``save_pretrained`` writes it.

        The same names, shapes and bytes, persistent buffers included; fused experts come out one
        by one. See `rdt_trainer.transformers_names`.

        Raises:
            SourceError: ``transformers`` is not installed, or ``save_pretrained`` would compute
                something that is no view; other than that as the class.
        """
        from rdt_trainer.transformers_names import transformers_names

        return cls(
            model,
            names=transformers_names(model),
            extra_names=extra_names,
            dtype=dtype,
            persistent_buffers=True,
            stable=stable,
        )

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """Every checkpoint name, group by group; described once, without gathering anything."""
        tensors = self._tensors()
        return [
            SourceMeta(
                name,
                served.dtype,
                served.tensor_shape if served.region is None else served.region.shape,
                mesh_ranks(tensors[served.tensor_name]),
            )
            for name, served in self._served.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the parameters this rank holds; see `WeightSource.iter_full`."""
        return self._iter(())

    def stable_tensors(self) -> dict[str, torch.Tensor]:
        """What is served from a parameter's own memory: neither cast, copied nor gathered.

        The same dict again while the module's tensors are what they were; see `StablePasses`.
        """
        if not self._stable:
            return {}
        tensors = self._checked_tensors()
        if self._stable_tensors is None:
            self._stable_tensors = {
                name: served.part(tensors[served.tensor_name].detach())
                for name, served in self._served.items()
                if served.is_stable(tensors[served.tensor_name])
            }
        return self._stable_tensors

    def iter_rest(self, stable: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the other names; see `StablePasses`."""
        return iter(()) if len(stable) == len(self._served) else self._iter(stable)

    def _iter(self, left_out: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._checked_tensors()
        held: dict[Whole, torch.Tensor] = {}
        for name, served in self._served.items():
            if name in left_out:
                continue
            tensor = tensors[served.tensor_name]
            if served.needs_no_gather(tensor):  # most of a model's many tensors
                yield name, served.part(tensor.detach())
            elif is_member(tensor):
                whole = held.pop(served.whole, None)
                if whole is None:
                    whole = served.gathered(tensor)
                if self._last[served.whole] != name:
                    held[served.whole] = whole
                part = served.part(whole)
                del whole  # the last part is the only one left that refers to it
                yield name, part
                del part

    @cached_property
    def _last(self) -> dict[Whole, str]:
        """The last name that each gathered tensor serves."""
        return {served.whole: name for name, served in self._served.items()}

    @cached_property
    def _served(self) -> dict[str, Served]:
        """By checkpoint name, in the order in which they are served."""
        tensors = self._tensors()
        self._described = frozenset(tensors)
        self._check_table(tensors)
        found: dict[str, Served] = {}
        for tensor_name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            for name, region in self._parts(tensor_name, tensor):
                if name in found:
                    raise SourceError(
                        f"two parameters are both named {name}, {found[name].tensor_name} and "
                        f"{tensor_name}: expected distinct checkpoint names; check names="
                    )
                dtype = self._served_dtype(name, tensor)
                found[name] = Served(tensor_name, shape, region, dtype)
        for extra, name in self._extra_names.items():
            if extra in found or name not in found:
                problem = "is served already" if extra in found else f"repeats {name}, not served"
                raise SourceError(
                    f"extra name {extra} {problem}: expected a new name for one of the "
                    f"{len(found)} names the module has"
                )
            found[extra] = replace(found[name], extra_name=extra)
        _log_copies(found)
        return {name: found[name] for name in group_ordered(found)}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The module's tensors; one that is `stable` is walked again only when it has others."""
        if not self._stable:  # nothing that was replaced may live on here
            return module_tensors(self._module, persistent_buffers=self._persistent_buffers)
        if self._snapshot is None or not self._snapshot.holds():
            self._walked = module_tensors(self._module, persistent_buffers=self._persistent_buffers)
            self._snapshot = ModuleSnapshot(self._module, self._walked.values())
        return self._walked

    def _checked_tensors(self) -> Mapping[str, torch.Tensor]:
        """The module's tensors, which are those that were described."""
        tensors = self._tensors()
        if tensors is not self._unchanged:
            self._check_unchanged(tensors)
            self._unchanged = tensors if self._stable else None
            self._stable_tensors = None
        return tensors

    def _check_unchanged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What is served was declared once: none may go, change its shape, or come."""
        for served in self._served.values():
            served.check_present(tensors.get(served.tensor_name))
        self._check_table(tensors)
        for name in sorted(tensors.keys() - self._described):
            if any(self._parts(name, tensors[name])):
                raise SourceError(
                    f"{name} is new in the module: expected the {len(self._described)} tensors it "
                    "had when the trainer was initialised; build a new source and trainer, or "
                    "leave it out by names="
                )

    def _check_table(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if isinstance(self._names, Mapping) and self._names.keys() != tensors.keys():
            unlisted = next((name for name in tensors if name not in self._names), None)
            unknown = next((name for name in self._names if name not in tensors), None)
            raise SourceError(
                f"names= does not list {unlisted}: map it, to None to leave it out"
                if unlisted is not None
                else f"names= lists {unknown}, which is none of the {len(tensors)} tensors that "
                "the module has: expected names without wrappers, a tied one's first"
            )

    def _parts(self, tensor_name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Region | None]]:
        match self._names:
            case None:
                named: Named = tensor_name
            case Mapping() as table:
                named = table[tensor_name]
            case mapped:
                named = mapped(tensor_name)
        if isinstance(named, str):
            yield named, None
        elif named is not None:
            parts = regions(tensor_name, tensor.shape, tensor.dtype, named)
            yield from ((view.name, part) for view, part in zip(named, parts, strict=True))

    def _served_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        wanted = self._dtype(name) if callable(self._dtype) else self._dtype
        castable = tensor.is_floating_point() and tensor.element_size() >= 2
        return tensor.dtype if wanted is None or not castable else wanted


def _log_copies(served: Mapping[str, Served]) -> None:
    views = {name: part.region for name, part in served.items()}
    copied = [name for name, region in views.items() if region and not region.is_contiguous]
    if copied:
        _logger.info(
            "%d of %d checkpoint names, %s first, are views that are not contiguous: each is "
            "copied in every pass",
            len(copied),
            len(served),
            copied[0],
        )
