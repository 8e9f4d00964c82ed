"""How a tensor is spread over ranks: torch's and vLLM's words for it, and the plan's."""

from collections.abc import Iterable
from itertools import pairwise, product
from typing import Any

import torch

from rdt_plan import AxisPlacement, OwnershipError, ParamMeta, Placement, canonical
from rdt_plan.shards import cut_at_borders
from rdt_plan.slices import contiguous_stride
from rdt_trainer.errors import SourceError
from rdt_trainer.named_views import Region
from rdt_trainer.rank_meshes import RankMesh

__all__ = ["axis_placements", "layout_of", "region_held", "view_layout"]

GATHER_REMEDY = "serve it by ModuleSource, which gathers it whole"


def axis_placements(name: str, placements: Iterable[Any], num_dims: int) -> tuple[str, ...]:
    """The plan's spelling of what each axis of a mesh does to ``name``, a tensor of so many dims.

    Takes `AxisPlacement` and its text, and ``Replicate``, ``Shard`` and ``_StridedShard`` of torch
    and of vLLM, told by their names. Raises `SourceError` for any other, such as ``Partial``.
    """
    found = []
    for each in placements:
        kind = type(each).__name__
        if isinstance(each, str | AxisPlacement):
            found.append(str(each))
        elif kind == "Replicate":
            found.append("replicate")
        elif kind in ("Shard", "_StridedShard"):
            found.append(str(AxisPlacement(each.dim % num_dims, getattr(each, "split_factor", 1))))
        else:
            raise SourceError(
                f"{name} is placed by {each!r}: expected each axis of its mesh to replicate it or "
                f"to shard a dim; redistribute it, or {GATHER_REMEDY}"
            )
    return tuple(found)


def layout_of(name: str, tensor: torch.Tensor, mesh: RankMesh) -> ParamMeta:
    """Which ranks hold which box of a ``DTensor``; bytes stand for its elements.

    Raises:
        SourceError: placements that no plan can express, or that this rank's local tensor does not
            have; names the tensor, and says what to do.
    """
    sharded: Any = tensor
    placements = axis_placements(name, sharded.placements, tensor.ndim)
    copies = ("replicate",) * (len(mesh.shape) - len(placements))
    layout = _meta(name, tuple(tensor.shape), mesh.ranks, mesh.shape, (*copies, *placements))
    rank = sharded.device_mesh.get_rank()
    try:
        box = layout.box(rank)
    except OwnershipError as error:
        raise SourceError(f"{name}: {error}; or {GATHER_REMEDY}") from None
    local = sharded._local_tensor
    if rank not in layout.owners:
        return layout
    if local.numel() if box is None else local.shape != box.shape:
        raise SourceError(
            f"{name}: rank {rank} has {list(local.shape)} of {list(tensor.shape)}, which "
            f"{placements} over ranks {mesh.ranks} make {list(box.shape) if box else 'empty'}: "
            f"expected pieces as torch.chunk cuts them; {GATHER_REMEDY}"
        )
    return layout


def view_layout(name: str, region: Region, of: ParamMeta) -> ParamMeta:
    """Which ranks hold which box of a view of the tensor ``of``, ``name`` being the view's.

    Each dim that the mesh cuts must lie within one piece, whose ranks then hold it, or be a dim of
    the view too, whole. Anything else is a `SourceError` with the remedy.
    """
    grid = of.grid
    if grid is None or 0 in region.shape or 0 in of.shape:
        return _meta(name, region.shape, of.owners, (), ())
    axes = [AxisPlacement.parse(text) for text in of.placements]
    kept: dict[int | None, int | None] = {None: None}
    piece: dict[int, int] = {}
    for dim in {axis.dim for axis in axes} - {None}:
        assert dim is not None
        borders, step = grid.borders[dim], contiguous_stride(of.shape)[dim]
        span = _span(region, step, of.shape[dim])
        within = [
            index
            for index, (start, stop) in enumerate(pairwise(borders))
            if len(borders) == 2 or (span and start <= span[0] and span[1] <= stop)
        ]
        dims = [
            at
            for at, found in enumerate(zip(region.shape, region.stride, strict=True))
            if found == (of.shape[dim], step)
        ]
        if within:
            piece[dim] = within[0]
        elif dims:
            kept[dim] = dims[0]
        else:
            raise SourceError(
                f"{name} is a view of {of.name} {list(of.shape)}, whose dim {dim} ranks hold in "
                f"pieces from {list(borders[:-1])}: expected the view to lie within one piece of "
                f"it, or to have all of the dim as a dim of its own; {GATHER_REMEDY}"
            )
    positions = list(product(*map(range, of.mesh_shape)))
    one = next(
        position
        for position, cell in zip(positions, grid.cells, strict=True)
        if cell is not None and all(cell[dim] == index for dim, index in piece.items())
    )
    fixed = [axis.dim in piece for axis in axes]
    owners = tuple(
        rank
        for rank, position in zip(of.owners, positions, strict=True)
        if all(at == want or not fix for at, want, fix in zip(position, one, fixed, strict=True))
    )
    left = [(n, axis) for n, axis, fix in zip(of.mesh_shape, axes, fixed, strict=True) if not fix]
    return _meta(
        name,
        region.shape,
        owners,
        tuple(extent for extent, _ in left),
        tuple(str(AxisPlacement(kept[axis.dim], axis.split_factor)) for _, axis in left),
    )


def region_held(region: Region, of: ParamMeta, rank: int) -> Region:
    """What ``rank`` holds of a view of ``of`` whose `view_layout` is told: in its local tensor.

    The same elements in the view's order; dims may be merged.
    """
    if of.grid is None or 0 in region.shape:
        return region
    shape, stride = region.shape, contiguous_stride(region.shape)
    whole = canonical(of.name, of.dtype, region.offset, shape, region.stride)
    copy = Placement(whole, "", "", 0, shape, stride, of.dtype, stride)
    cell = of.grid.cells[of.owners.index(rank)]
    (piece,) = (piece for at, (piece, _) in cut_at_borders(whole, (copy,), of) if at == cell)
    return Region(piece.offset, piece.shape, piece.stride)


def _meta(
    name: str,
    shape: tuple[int, ...],
    owners: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[str, ...],
) -> ParamMeta:
    """Without a mesh where that cuts nothing."""
    if all(text == "replicate" for text in placements):
        return ParamMeta(name, "int8", shape, tuple(sorted(owners)))
    return ParamMeta(name, "int8", shape, owners, mesh_shape, placements)


def _span(region: Region, step: int, extent: int) -> tuple[int, int] | None:
    """The indices that a region takes of a dim, as [start, stop); None where it has no such."""
    start, inner = region.offset // step % extent, region.offset % step
    last = start
    for times, stride in zip(region.shape, region.stride, strict=True):
        if times == 1 or stride % (step * extent) == 0:
            continue
        if stride < step:
            inner += (times - 1) * stride
        elif stride < step * extent and stride % step == 0:
            last += (times - 1) * (stride // step)
        else:
            return None
    return (start, last + 1) if inner < step and last < extent else None
