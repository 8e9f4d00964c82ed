"""Hypothesis strategies for meshes that cut a tensor."""

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from rdt_plan.errors import OwnershipError
from rdt_plan.manifest import ParamMeta
from rdt_plan.mesh import AxisPlacement, grid_of

__all__ = ["mesh_placements", "over_a_mesh"]


@st.composite
def mesh_placements(
    draw: st.DrawFn, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[AxisPlacement, ...]:
    """One placement an axis: replicated, sharded, or strided as FSDP2 over tensor parallelism."""
    dims = st.none() if not shape else st.one_of(st.none(), st.integers(0, len(shape) - 1))
    axes: list[AxisPlacement] = []
    for at in reversed(range(len(mesh_shape))):
        dim = draw(dims)
        factors = [1]
        for axis, size in zip(axes, mesh_shape[at + 1 :], strict=True):
            if dim is not None and axis.dim == dim:
                factors.append(factors[-1] * size)
        factor = draw(st.sampled_from((factors[0], factors[-1]))) if dim is not None else 1
        axes.insert(0, AxisPlacement(dim, factor))
    return tuple(axes)


@st.composite
def over_a_mesh(draw: st.DrawFn, meta: ParamMeta, ranks: Sequence[int]) -> ParamMeta:
    """``meta``, cut among some of ``ranks`` in any order, unevenly too."""
    extents: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        extents.append(draw(st.integers(1, len(ranks) // prod(extents))))
    mesh_shape = tuple(extents)
    owners = tuple(draw(st.permutations(ranks))[: prod(mesh_shape)])
    axes = draw(mesh_placements(meta.shape, mesh_shape))
    placements = tuple(map(str, axes))
    try:
        grid_of(meta.shape, mesh_shape, placements)
    except OwnershipError:  # a strided shard that cuts unevenly
        placements = tuple(str(AxisPlacement(axis.dim)) for axis in axes)
    return ParamMeta(meta.name, meta.dtype, meta.shape, owners, mesh_shape, placements)
