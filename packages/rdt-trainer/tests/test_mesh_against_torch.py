"""What `rdt_plan` says each rank of a mesh holds, against torch's own functions."""

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rdt_plan import AxisPlacement, Manifest, OwnershipError, ParamMeta
from rdt_plan.testing import mesh_placements

SHAPES = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def torchs(axis: AxisPlacement) -> Placement:
    if axis.dim is None:
        return Replicate()
    if axis.split_factor == 1:
        return Shard(axis.dim)
    return _StridedShard(axis.dim, split_factor=axis.split_factor)


def meta_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], axes: Sequence[AxisPlacement]
) -> ParamMeta:
    """Validated; owners count down, so that ranks are no positions."""
    owners = tuple(reversed(range(prod(mesh_shape))))
    meta = ParamMeta("w", "int64", shape, owners, mesh_shape, tuple(map(str, axes)))
    return Manifest.build([meta]).param("w")


def piece(full: torch.Tensor, meta: ParamMeta, rank: int) -> torch.Tensor:
    """What ``rank`` holds of ``full`` according to its box; empty without one."""
    if (box := meta.box(rank)) is None:
        return full.new_empty(0)
    for dim, (start, extent) in enumerate(zip(box.start, box.shape, strict=True)):
        full = full.narrow(dim, start, extent)
    return full


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).view(shape)


def split_by_torch(
    full: torch.Tensor,
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    position: Sequence[int],
) -> torch.Tensor:
    """As `distribute_tensor` splits, without communication: axis after axis, outer ones first."""
    for size, placement, index in zip(mesh_shape, placements, position, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            full = placement._split_tensor(full, size, with_padding=False)[0][index]
    return full


@given(st.data())
def test_boxes_are_what_torch_describes_and_splits(data: st.DataObject) -> None:
    shape, mesh_shape = data.draw(SHAPES), data.draw(MESHES)
    axes = data.draw(mesh_placements(shape, mesh_shape))
    try:
        meta = meta_of(shape, mesh_shape, axes)
    except OwnershipError:
        assert any(axis.split_factor > 1 for axis in axes)
        assume(False)
        return
    full, placements = numbered(shape), [torchs(axis) for axis in axes]
    for rank, position in zip(meta.owners, product(*map(range, mesh_shape)), strict=True):
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(position), placements
        )
        held = split_by_torch(full, mesh_shape, placements, position)
        assert tuple(held.shape) == tuple(local_shape)
        box = meta.box(rank)
        if box is None:
            assert held.numel() == 0
        else:
            assert (box.start, box.shape) == (tuple(offset), tuple(local_shape))
            assert torch.equal(piece(full, meta, rank), held)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_fsdp2_over_tensor_parallelism_on_one_dim(
    rows: int, dp: int, tp: int, replicated: bool
) -> None:
    """FSDP2 chunks the piece that tensor parallelism left: the box, or a refusal.

    It is refused where torch's placements, read by `full_tensor` and checkpoints, say otherwise.
    """
    mesh_shape = (2, dp, tp) if replicated else (dp, tp)
    axes = [AxisPlacement(0, tp), AxisPlacement(0)]
    axes = [AxisPlacement(None), *axes] if replicated else axes
    full, placements = numbered((rows, 2)), [torchs(axis) for axis in axes]
    pieces = []
    for *_, data_index, tensor_index in product(*map(range, mesh_shape)):
        of_tensor_parallelism = _chunk_with_empty(full, tp, dim=0)[tensor_index]
        held = full.new_empty(0)
        if of_tensor_parallelism.numel():
            held = _chunk_with_empty(of_tensor_parallelism, dp, dim=0)[data_index]
        pieces.append(held)
    described = [
        split_by_torch(full, mesh_shape, placements, position)
        for position in product(*map(range, mesh_shape))
    ]
    agree = all(
        torch.equal(a.flatten(), b.flatten()) for a, b in zip(pieces, described, strict=True)
    )
    if not agree:
        with pytest.raises(OwnershipError, match=r"'w': .* torch describes rows .* FSDP2 holds"):
            meta_of((rows, 2), mesh_shape, axes)
        return
    meta = meta_of((rows, 2), mesh_shape, axes)
    for rank, held in zip(meta.owners, pieces, strict=True):
        assert torch.equal(piece(full, meta, rank).flatten(), held.flatten())


def test_both_kinds_of_unevenness_occur() -> None:
    axes = [AxisPlacement(0, 2), AxisPlacement(0)]
    assert meta_of((7, 2), (2, 2), axes).box(3) is not None
    with pytest.raises(OwnershipError, match="FSDP2 holds"):
        meta_of((9, 2), (4, 2), axes)


@given(st.integers(1, 20), st.integers(1, 6))
def test_fsdp2_alone_and_hybrid(rows: int, size: int) -> None:
    full = numbered((rows, 3))
    chunks = _chunk_with_empty(full, size, dim=0)
    for mesh_shape, axes in (
        ((size,), [AxisPlacement(0)]),
        ((2, size), [AxisPlacement(None), AxisPlacement(0)]),
    ):
        meta = meta_of((rows, 3), mesh_shape, axes)
        for at, rank in enumerate(meta.owners):
            assert torch.equal(piece(full, meta, rank).flatten(), chunks[at % size].flatten())
