"""What the trainer holds: every parameter of the model, in order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from math import prod

from rdt_plan._encoding import manifest_form
from rdt_plan.digest import digest_of
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, OwnershipError
from rdt_plan.groups import GatherGroup, gather_groups
from rdt_plan.mesh import Box, Grid, grid_of
from rdt_plan.ownership import Ownership

__all__ = ["Manifest", "ParamMeta"]


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One named source tensor.

    Attributes:
        name: its checkpoint name.
        dtype: torch's dtype name without ``torch.``.
        shape: its full shape.
        owners: producer ranks that hold it, without repeats: in row-major order of their mesh,
            ascending when there is none.
        mesh_shape: shape of the mesh its owners form; ``()`` when every owner holds it whole.
        placements: what each axis of the mesh does to it, as `AxisPlacement` spells it; ``()``
            when there is no mesh.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] = (0,)
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)

    @property
    def grid(self) -> Grid | None:
        """How its mesh cuts it; None without a mesh. Raises `OwnershipError` for a bad mesh."""
        return grid_of(self.shape, self.mesh_shape, self.placements) if self.mesh_shape else None

    @property
    def holders(self) -> tuple[int, ...]:
        """Those of its owners whose piece is not empty, in mesh order."""
        if (grid := self.grid) is None:
            return self.owners
        return tuple(r for r, cell in zip(self.owners, grid.cells, strict=True) if cell is not None)

    def box(self, rank: int) -> Box | None:
        """The part of it that ``rank`` holds; None when it holds nothing of it.

        >>> ParamMeta("w", "int8", (5, 4), (2, 7), (2,), ("shard(0)",)).box(7)
        Box(start=(3, 0), shape=(2, 4))
        """
        if rank not in self.owners:
            return None
        if (grid := self.grid) is None:
            return Box((0,) * len(self.shape), self.shape)
        cell = grid.cells[self.owners.index(rank)]
        return None if cell is None else grid.box(cell)

    def held_by(self, rank: int) -> "ParamMeta | None":
        """The contiguous tensor that ``rank`` holds of it, as a parameter of that rank alone.

        Slices that ``rank`` serves count in this tensor. None when it holds nothing of it.
        """
        if (box := self.box(rank)) is None:
            return None
        if not self.mesh_shape:
            return self
        return replace(self, shape=box.shape, owners=(rank,), mesh_shape=(), placements=())


@dataclass(frozen=True)
class Manifest:
    """The parameters of the whole model, in the order every trainer rank gathers them.

    Attributes:
        params: each parameter once; the names of a gather group are contiguous.

    Raises:
        ManifestError: no parameters, a name twice, an unknown dtype, a negative extent, or a
            gather group that is not contiguous.
        OwnershipError: owners that are missing, unsorted (without a mesh), repeated or negative,
            or a mesh that is not what `rdt_plan.mesh.grid_of` and the number of owners allow.
    """

    params: tuple[ParamMeta, ...]

    @classmethod
    def build(cls, params: Iterable[ParamMeta]) -> "Manifest":
        """Validate ``params`` and hold them.

        >>> manifest = Manifest.build([ParamMeta("layers.0.w", "bfloat16", (4, 2))])
        >>> manifest.groups[0].key, manifest.param("layers.0.w").num_bytes
        ('layers.0', 16)
        """
        return cls(tuple(params))

    def __post_init__(self) -> None:
        if not self.params:
            raise ManifestError(
                "the manifest has no parameters: expected at least one; "
                "check the patterns that select the source's names"
            )
        for param in self.params:
            _check(param)
        if len(self.by_name) != len(self.params):
            seen: set[str] = set()
            twice = next(p.name for p in self.params if p.name in seen or seen.add(p.name))
            raise ManifestError(f"{twice!r} is listed twice: every name must be listed once")
        _ = self.groups  # raises when a group is not contiguous

    @cached_property
    def groups(self) -> tuple[GatherGroup, ...]:
        """The gather groups, in manifest order."""
        return gather_groups([param.name for param in self.params])

    @cached_property
    def ownership(self) -> Ownership:
        """Who holds what; every party derives the same."""
        return Ownership.of(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, order, dtypes, shapes, owners, placements and groups."""
        return digest_of("manifest", manifest_form(self))

    def param(self, name: str) -> ParamMeta:
        """The parameter called ``name``; raises `ManifestError` when there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise self._unknown(name) from None

    def group_of(self, name: str) -> int:
        """Index of the gather group of ``name``; raises `ManifestError` when unknown."""
        try:
            return self.group_by_name[name]
        except KeyError:
            raise self._unknown(name) from None

    @cached_property
    def by_name(self) -> Mapping[str, ParamMeta]:
        """Every parameter by its name."""
        return {param.name: param for param in self.params}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of its parameters, in order."""
        return tuple(self.by_name)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The position of every name."""
        return dict(zip(self.by_name, count(), strict=False))

    @cached_property
    def group_by_name(self) -> Mapping[str, int]:
        """Index of the gather group of every name."""
        return {name: group.index for group in self.groups for name in group.names}

    def _unknown(self, name: str) -> ManifestError:
        return ManifestError(
            f"{name!r} is not in the manifest of {len(self.params)} parameters: expected one of "
            f"its names, such as {self.params[0].name!r}; map trainer names to checkpoint names"
        )


def _check(param: ParamMeta) -> None:
    if not param.name:
        raise ManifestError(f"a parameter of shape {param.shape} has an empty name")
    try:
        item_bytes(param.dtype)
    except ManifestError as error:
        raise ManifestError(f"{param.name!r}: {error}") from None
    if any(extent < 0 for extent in param.shape):
        raise ManifestError(f"{param.name!r}: expected extents of 0 or more, found {param.shape}")
    if not param.owners:
        raise OwnershipError(f"{param.name!r} is held by no rank: expected at least one owner")
    owners = param.owners if not param.mesh_shape else sorted(param.owners)
    if owners[0] < 0 or any(a >= b for a, b in pairwise(owners)):
        raise OwnershipError(
            f"{param.name!r}: expected owner ranks from 0 without repeats, ascending where they "
            f"form no mesh, found {param.owners}"
        )
    if param.mesh_shape or param.placements:
        _check_mesh(param)


def _check_mesh(param: ParamMeta) -> None:
    if prod(param.mesh_shape) != len(param.owners):  # before anything loops over the mesh
        raise OwnershipError(
            f"{param.name!r}: expected one owner a position of the mesh {param.mesh_shape}, found "
            f"{len(param.owners)}: {param.owners}"
        )
    try:
        grid_of(param.shape, param.mesh_shape, param.placements)
    except OwnershipError as error:
        raise OwnershipError(f"{param.name!r}: {error}") from None
