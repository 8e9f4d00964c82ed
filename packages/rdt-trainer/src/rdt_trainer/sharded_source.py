"""A torch module as a weight source of shards: every rank serves what it holds, gathers nothing."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from rdt_plan import AxisPlacement, ParamMeta
from rdt_trainer.named_module import NamedModule
from rdt_trainer.named_views import Region
from rdt_trainer.placements import layout_of, region_held, view_layout
from rdt_trainer.source import SourceMeta

__all__ = ["ShardedModuleSource"]

ALIGNMENT = 256  # bytes, of a tensor in the staging area


class ShardedModuleSource(NamedModule):
    """Serves each rank's own shards of a module's ``DTensor``s; a `LocalWeightSource`.

    Arguments as of `NamedModule`. There is no collective in a pass: workers' slices are cut at the
    borders of the shards, and each piece is read from the rank that has it. Ranks that hold equal
    parts, of a plain parameter too, share the readers. What is served as it is, and contiguous, is
    read from the parameter's own memory.

    All else (masters that are cast, views that are not contiguous) is copied, at the start of each
    sync, into one staging area a rank, which is made and registered once: as large as what it
    holds, so half of fp32 masters. With ``stable=False`` there is none, and each is copied when it
    is yielded.

    Raises:
        SourceError: from ``metadata``, beside what `NamedModule` raises: a placement that is none
            of replicated, sharded, and FSDP2 over tensor parallelism on one dim; such shards of
            sizes that do not divide; or a view that ranks do not hold in pieces of its own dims.
    """

    _staging: Mapping[str, torch.Tensor] = {}  # by name; made once, since it is registered

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """Every checkpoint name, group by group, with the mesh that cuts it."""
        return [piece.meta for piece in self._pieces.values()]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the pieces that this rank holds; see `LocalWeightSource.iter_local`."""
        return self._iter(())

    def iter_rest(self, stable: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the other names; see `StablePasses`."""
        if len(stable) < len(self._held):
            yield from self._iter(stable)

    def fill_stable_tensors(self) -> None:
        """Copy into the staging area what is served from there; see `StablePasses`."""
        if self._staging:
            self.stable_tensors()  # of the module as it is now
        for name, staged in self._staging.items():
            piece = self._held[name]
            staged.copy_(piece.of(self._walked[piece.tensor_name]))

    def _stable_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every piece of this rank: where the parameter is, or in the staging area."""
        pieces = {name: each for name, each in self._held.items() if 0 not in each.shape}
        of = {name: tensors[each.tensor_name] for name, each in pieces.items()}
        staged = {n: each for n, each in pieces.items() if not each.is_in_place(of[n])}
        if staged.keys() != self._staging.keys():
            device = next((tensor.device for tensor in of.values()), torch.device("cpu"))
            area = _area(list(staged.values()), device)
            self._staging = dict(zip(staged, area, strict=True))
        staging = self._staging
        return {n: staging[n] if n in staging else each.of(of[n]) for n, each in pieces.items()}

    def _iter(self, left_out: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._checked_tensors()
        if left_out:
            self._check_standing(tensors)
        for name, piece in self._held.items():
            if name not in left_out:
                part = piece.of(tensors[piece.tensor_name])
                yield name, part.to(piece.meta.dtype).contiguous()

    @cached_property
    def _held(self) -> dict[str, "_Piece"]:
        """Of each name that is not empty here, what this rank holds."""
        return {name: piece for name, piece in self._pieces.items() if piece.is_held}

    @cached_property
    def _pieces(self) -> dict[str, "_Piece"]:
        """By checkpoint name, in the order in which they are served."""
        tensors = self._tensors()
        layouts: dict[str, ParamMeta] = {}  # of whole tensors
        found = {}
        for name, served in self._served.items():
            key, region, mesh = served.tensor_name, served.region, self._meshes.get(name)
            shape = served.tensor_shape if region is None else region.shape
            if mesh is None:
                meta = SourceMeta(name, served.dtype, shape)
                found[name] = _Piece(meta, key, shape, region)
                continue
            if key not in layouts:
                layouts[key] = layout_of(key, tensors[key], mesh)
            whole: Any = tensors[key]
            rank, layout = whole.device_mesh.get_rank(), layouts[key]
            if region is not None:
                layout = view_layout(name, region, layouts[key])
            held = layout.held_by(rank)
            if region is not None and held is not None:
                region = region_held(region, layouts[key], rank)
            axes = tuple(map(AxisPlacement.parse, layout.placements))
            meta = SourceMeta(name, served.dtype, shape, layout.owners, layout.mesh_shape, axes)
            found[name] = _Piece(meta, key, held.shape if held else (), region, held is not None)
        return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """What this rank holds of a checkpoint name.

    Attributes:
        meta: the name's.
        tensor_name: of the module's tensor that it is in.
        shape: of the piece.
        region: where it is in that tensor's local one, in its order; None is all of it.
        is_held: False where this rank has nothing of it.
    """

    meta: SourceMeta
    tensor_name: str
    shape: tuple[int, ...]
    region: Region | None
    is_held: bool = True

    def is_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether it is a contiguous part of the memory of ``tensor``, in the dtype served."""
        return (
            tensor.dtype == self.meta.dtype
            and _local(tensor).is_contiguous()
            and (self.region is None or self.region.is_contiguous)
        )

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece, in the dtype of ``tensor``; shares its memory where it can."""
        local = _local(tensor).detach()
        if self.region is None:
            return local
        return self.region(local.contiguous()).reshape(self.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _area(pieces: Sequence[_Piece], device: torch.device) -> Iterator[torch.Tensor]:
    """Room for each of ``pieces``, contiguous, in one allocation."""
    sizes = [prod(piece.shape) * piece.meta.dtype.itemsize for piece in pieces]
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    area = torch.empty(sum(steps), dtype=torch.uint8, device=device)
    for piece, size, room in zip(pieces, sizes, area.split(steps), strict=True):
        yield room[:size].view(piece.meta.dtype).view(piece.shape)
