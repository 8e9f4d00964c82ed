"""A torch module as a weight source."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SourceError
from rdt_trainer.module_tensors import module_tensors
from rdt_trainer.named_views import NamedView, Region, regions
from rdt_trainer.source import SourceMeta

__all__ = ["ModuleSource", "Named", "Names"]

# What a tensor of the module is in a checkpoint: one name, parts with names of their own, nothing.
Named = str | Sequence[NamedView] | None
Names = Callable[[str], Named] | Mapping[str, Named]

_Whole = tuple[str, torch.dtype, str | None]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Served:
    """Where a checkpoint name's elements are.

    Attributes:
        tensor_name: of the module's tensor.
        tensor_shape: its full shape.
        region: the part of it; None is all of it.
        dtype: it is cast to this, whole, before the region is taken.
        extra_name: the further name this is; gathered for itself, as it may be served many groups
            after the first.
    """

    tensor_name: str
    tensor_shape: tuple[int, ...]
    region: Region | None
    dtype: torch.dtype
    extra_name: str | None = None

    @property
    def whole(self) -> _Whole:
        """Equal for names that one gathered tensor serves."""
        return self.tensor_name, self.dtype, self.extra_name


class ModuleSource:
    """Serves the parameters of any ``nn.Module``, frozen ones included; a `WeightSource`.

    Names lose the segments that wrappers add (``torch.compile``, FSDP, activation checkpointing,
    ``DistributedDataParallel``). Tied parameters appear once, under the first of their names. Each
    pass yields tensors detached, contiguous and whole: the ranks of a ``DTensor``'s mesh gather it
    together (FSDP2, tensor parallelism), one parameter at a time, in metadata order. The mesh's
    ranks are taken to be the trainer's ranks.

    Args:
        module: read again in every pass, so its parameters may be replaced, but neither renamed
            nor reshaped.
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

    Raises:
        SourceError: from ``metadata``, so while the trainer is initialised: names that collide,
            extra names of nothing, views that are none or leave elements out, adapters that are
            not merged, quantised parameters, FSDP1's flat ones, or any that are not on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        names: Names | None = None,
        extra_names: Mapping[str, str] | None = None,
        dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
        persistent_buffers: bool = False,
    ) -> None:
        self._module = module
        self._names = names
        self._extra_names = dict(extra_names or {})
        self._dtype = dtype
        self._persistent_buffers = persistent_buffers
        self._described: frozenset[str] = frozenset()  # the tensors that `metadata` looked at

    @classmethod
    def of_transformers(
        cls,
        model: nn.Module,
        *,
        extra_names: Mapping[str, str] | None = None,
        dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
    ) -> Self:
        """Serves a ``transformers`` model, wrapped or not, as its ``save_pretrained`` writes it.

        The same names, shapes and bytes, persistent buffers included; fused experts come out one
        by one. See `rdt_trainer.transformers_names`.

        Raises:
            SourceError: ``transformers`` is not installed, or ``save_pretrained`` would compute
                something that is no view; other than that as the class.
        """
        from rdt_trainer.transformers_names import transformers_names

        names = transformers_names(model)
        return cls(
            model, names=names, extra_names=extra_names, dtype=dtype, persistent_buffers=True
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
                _mesh_ranks(tensors[served.tensor_name]),
            )
            for name, served in self._served.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the parameters this rank holds; see `WeightSource.iter_full`."""
        tensors = self._tensors()
        self._check_unchanged(tensors)
        last = {served.whole: name for name, served in self._served.items()}
        held: dict[_Whole, torch.Tensor] = {}
        for name, served in self._served.items():
            if _is_member(tensors[served.tensor_name]):
                if served.whole not in held:
                    held[served.whole] = _gathered(tensors[served.tensor_name], served.dtype)
                yield name, _part(held, served, is_last=last[served.whole] == name)

    @cached_property
    def _served(self) -> dict[str, _Served]:
        """By checkpoint name, in the order in which they are served."""
        tensors = self._tensors()
        self._described = frozenset(tensors)
        self._check_table(tensors)
        found: dict[str, _Served] = {}
        for tensor_name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            for name, region in self._parts(tensor_name, tensor):
                if name in found:
                    raise SourceError(
                        f"two parameters are both named {name}, {found[name].tensor_name} and "
                        f"{tensor_name}: expected distinct checkpoint names; check names="
                    )
                dtype = self._served_dtype(name, tensor)
                found[name] = _Served(tensor_name, shape, region, dtype)
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
        return module_tensors(self._module, persistent_buffers=self._persistent_buffers)

    def _check_unchanged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What is served was declared once: none may go, change its shape, or come."""
        for served in self._served.values():
            _check_present(served, tensors)
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


def _check_present(served: _Served, tensors: Mapping[str, torch.Tensor]) -> None:
    tensor = tensors.get(served.tensor_name)
    if tensor is None or tuple(tensor.shape) != served.tensor_shape:
        found = "no longer in the module" if tensor is None else f"now {list(tensor.shape)}"
        raise SourceError(
            f"{served.tensor_name} is {found}: expected the {list(served.tensor_shape)} it was "
            "when the trainer was initialised; build a new source and trainer"
        )


@torch.no_grad()
def _gathered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Cast before gathering: a bf16 gather of fp32 shards moves half the bytes.
    tensor = tensor.detach().to(dtype)
    gather: Any = getattr(tensor, "full_tensor", None)
    return (gather() if callable(gather) else tensor).contiguous()


def _part(held: dict[_Whole, torch.Tensor], served: _Served, *, is_last: bool) -> torch.Tensor:
    """The served part of what is held; the last one is the only one left that refers to it."""
    whole = held.pop(served.whole) if is_last else held[served.whole]
    return whole if served.region is None else served.region(whole).contiguous()


def _log_copies(served: Mapping[str, _Served]) -> None:
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


def _mesh_ranks(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The ranks a DTensor is spread over; None for a plain tensor, which every rank has."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return None if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _is_member(tensor: torch.Tensor) -> bool:
    mesh: Any = getattr(tensor, "device_mesh", None)
    return mesh is None or mesh.get_coordinate() is not None
