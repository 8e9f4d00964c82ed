"""What of a torch module has which checkpoint name: what the sources over modules share."""

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import torch
from torch import nn

from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SourceError
from rdt_trainer.module_snapshot import ModuleSnapshot
from rdt_trainer.module_tensors import module_tensors
from rdt_trainer.named_views import NamedView, Region, regions
from rdt_trainer.rank_meshes import RankMesh, rank_meshes
from rdt_trainer.served import Served
from rdt_trainer.wrappers import reshard, sharded_modules

__all__ = ["Named", "NamedModule", "Names"]

# What a tensor of the module is in a checkpoint: one name, parts with names of their own, nothing.
Named = str | Sequence[NamedView] | None
Names = Callable[[str], Named] | Mapping[str, Named]

_logger = logging.getLogger(__name__)
_local_of = attrgetter("_local_tensor")


class NamedModule:
    """The tensors of an ``nn.Module`` under checkpoint names, described once and looked at again.

    Names lose the segments that wrappers add (``torch.compile``, FSDP, activation checkpointing,
    ``DistributedDataParallel``). Frozen parameters are included; tied ones appear once, under the
    first of their names. What ``fully_shard`` left gathered after a forward pass is sharded again
    before anything is looked at, by the modules' own ``reshard()``. The ranks of a ``DTensor``'s
    mesh are taken to be the trainer's ranks; where it is not on all of them, ``metadata`` is a
    collective over the default group, see `rdt_trainer.rank_meshes`.

    Args:
        module: read again in every pass. Its parameters may neither be renamed nor reshaped; see
            ``stable`` for those that are replaced.
        names: maps a tensor's name in the module to its checkpoint name; to a list of
            `NamedView`, which together hold every element once, where the checkpoint has it in
            parts; or to None to leave it out. A function, or a table that lists every tensor.
        extra_names: further checkpoint names, each for one that is served already, such as
            ``{"lm_head.weight": "model.embed_tokens.weight"}`` where these are tied.
        dtype: serve floating-point parameters of 16 bits or more as this dtype, so fp32 masters
            as bf16. Or a function from checkpoint name to dtype, None for its own: for the few
            that the checkpoint keeps in fp32.
        persistent_buffers: serve these too.
        stable: whether parameters stay the tensors they are, as under an optimizer. Workers then
            read them from where they are registered, and one that was replaced since the trainer
            was initialised is refused. False: each pass may find other tensors.

    Raises:
        SourceError: ``module`` is none. From ``metadata``, so while the trainer is initialised:
            names that collide, extra names of nothing, views that are none or leave elements out,
            adapters that are not merged, quantised parameters, FSDP1's flat ones, or tensors of
            several devices.
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
        self._module = _checked(module)
        self._names = names
        self._extra_names = dict(extra_names or {})
        self._dtype = dtype
        self._persistent_buffers = persistent_buffers
        self._stable = stable
        self._snapshot: ModuleSnapshot | None = None
        self._walked: dict[str, torch.Tensor] = {}  # while the snapshot holds
        self._sharded_modules: list[Any] = []  # of `fully_shard`
        self._sharded: list[torch.Tensor] = []  # the DTensors
        self._locals: list[torch.Tensor] = []  # of these, as they were
        self._unchanged: Mapping[str, torch.Tensor] | None = None  # what was checked last
        self._described: frozenset[str] = frozenset()  # the tensors that were described
        self._standing: dict[str, torch.Tensor] = {}
        self._standing_of: Mapping[str, torch.Tensor] | None = None

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

        reshard(sharded_modules(_checked(model)))
        return cls(
            model,
            names=transformers_names(model),
            extra_names=extra_names,
            dtype=dtype,
            persistent_buffers=True,
            stable=stable,
        )

    def stable_tensors(self) -> dict[str, torch.Tensor]:
        """What stays where it is, by checkpoint name.

        The same dict again while the module's tensors are what they were; see `StablePasses`.
        """
        if not self._stable:
            return {}
        if self._standing_of is not None and self._standing_of is self._unchanged:
            snapshot, is_plain = self._snapshot, not (self._sharded or self._sharded_modules)
            if is_plain and snapshot is not None and snapshot.holds():
                return self._standing
        tensors = self._checked_tensors()
        if self._standing_of is not tensors:
            self._standing = self._stable_of(tensors)
            self._standing_of = tensors
        return self._standing

    def _check_standing(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises unless what `stable_tensors` returned is of these tensors of the module."""
        read, of = self._standing, self._standing_of
        if of is None or of is tensors:
            return
        now = self.stable_tensors()
        for name in read:
            key = self._served[name].tensor_name
            if name not in now or tensors[key] is not of[key]:
                raise SourceError(
                    f"{name} is another tensor than the one that workers read: expected the one "
                    "that the module had when the trainer was initialised; change it in place, or "
                    "build a new source and trainer"
                )

    def _stable_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `stable_tensors` are of these tensors of the module."""
        raise NotImplementedError

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

    @cached_property
    def _meshes(self) -> dict[str, RankMesh]:
        """Of the names that are ``DTensor``s; may be a collective, see `rank_meshes`."""
        tensors = self._tensors()
        return rank_meshes({n: tensors[each.tensor_name] for n, each in self._served.items()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The module's tensors; one that is `stable` is walked again only when it has others."""
        if not self._stable:  # nothing that was replaced may live on here
            reshard(sharded_modules(self._module))
            return module_tensors(self._module, persistent_buffers=self._persistent_buffers)
        reshard(self._sharded_modules)
        if self._snapshot is None or not (self._snapshot.holds() and self._locals_hold()):
            self._sharded_modules = sharded_modules(self._module)
            reshard(self._sharded_modules)
            self._walked = module_tensors(self._module, persistent_buffers=self._persistent_buffers)
            self._sharded = [each for each in self._walked.values() if hasattr(each, "device_mesh")]
            self._locals = list(map(_local_of, self._sharded))
            tensors = chain(self._walked.values(), self._locals)
            self._snapshot = ModuleSnapshot(self._module, tensors)
        return self._walked

    def _locals_hold(self) -> bool:
        """Whether each DTensor has the local tensor that it had."""
        now = map(id, map(_local_of, self._sharded))
        return list(now) == list(map(id, self._locals))

    def _checked_tensors(self) -> Mapping[str, torch.Tensor]:
        """The module's tensors, which are those that were described.

        The same mapping again, where `stable`, while they are what they were.
        """
        tensors = self._tensors()
        if tensors is not self._unchanged:
            self._check_unchanged(tensors)
            self._unchanged = tensors if self._stable else None
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


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"expected the module to serve, a torch.nn.Module, found {reprlib.repr(module)}; pass "
            "the model itself, which from_pretrained(...) returns"
        )
    return module


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
