"""The trainer ranks that hold a ``DTensor``, also where each sees only a part of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rdt_trainer.errors import SourceError
from rdt_trainer.ranks import gather_from_ranks, group_size

__all__ = ["RankMesh", "rank_meshes"]


@dataclass(frozen=True, slots=True)
class RankMesh:
    """Ranks in row-major order of a mesh of ``shape``.

    Its last axes are those of the ``DTensor``; along one before them, ranks hold equal parts.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]


def rank_meshes(tensors: Mapping[str, torch.Tensor]) -> dict[str, RankMesh]:
    """The mesh of each ``DTensor`` among ``tensors``, by name.

    Under FSDP2 beside tensor parallelism, what only FSDP2 cuts is on one row of the mesh here, and
    on another row elsewhere. So where a mesh has not all ranks of the default group, this is a
    collective over that: the ranks tell each other theirs, and those of one name are put together.

    Raises:
        SourceError: the meshes of a name overlap, or have several shapes, or one has ranks that do
            not ascend.
        RankFailedError: another rank failed.
    """
    known: dict[int, RankMesh] = {}
    own: dict[str, RankMesh] = {}
    for name, tensor in tensors.items():
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is None:
            continue
        if id(mesh) not in known:
            ranks = mesh.mesh
            _check_ascending(name, ranks)
            known[id(mesh)] = RankMesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape))
        own[name] = known[id(mesh)]
    num_ranks = group_size()
    partial = {name: mesh for name, mesh in own.items() if len(mesh.ranks) != num_ranks}
    if not partial:
        return own
    everyone = gather_from_ranks(lambda: partial)
    found = {name: [each[name] for each in everyone if name in each] for name in partial}
    return own | {name: _together(name, meshes) for name, meshes in found.items()}


def _check_ascending(name: str, ranks: torch.Tensor) -> None:
    """Torch's process groups sort their ranks, so what it cuts of other meshes is in two orders."""
    for axis in range(ranks.ndim):
        if (ranks.diff(dim=axis) < 0).any():
            raise SourceError(
                f"{name} is on the mesh {ranks.tolist()}: expected ranks that ascend along each "
                "axis, as torch gathers what is cut over others in another order than it cuts"
            )


def _together(name: str, meshes: Iterable[RankMesh]) -> RankMesh:
    first, *others = dict.fromkeys(meshes)
    if not others:
        return first
    ranks = [rank for mesh in (first, *others) for rank in mesh.ranks]
    if len(set(ranks)) < len(ranks) or any(mesh.shape != first.shape for mesh in others):
        raise SourceError(
            f"{name} is on the meshes {[mesh.ranks for mesh in (first, *others)]}: expected its "
            "ranks to see one mesh, or equal parts of one; give different tensors different names"
        )
    return RankMesh(tuple(ranks), (1 + len(others), *first.shape))
