"""What the trainer holds: every parameter of the model, in order."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from rdt_plan._encoding import manifest_form
from rdt_plan.digest import digest_of
from rdt_plan.dtypes import item_bytes
from rdt_plan.errors import ManifestError, OwnershipError
from rdt_plan.groups import GatherGroup, gather_groups

__all__ = ["Manifest", "ParamMeta"]


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One named source tensor.

    Attributes:
        name: its checkpoint name.
        dtype: torch's dtype name without ``torch.``.
        shape: its full shape.
        owners: producer ranks that hold it, ascending, without repeats.
        mesh_shape: shape of the mesh its owners form; ``()`` when every owner holds it whole.
        placements: one entry a mesh axis; ``()`` when every owner holds it whole.
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


@dataclass(frozen=True)
class Manifest:
    """The parameters of the whole model, in the order every trainer rank gathers them.

    Attributes:
        params: each parameter once; the names of a gather group are contiguous.

    Raises:
        ManifestError: no parameters, a name twice, an unknown dtype, a negative extent, or a
            gather group that is not contiguous.
        OwnershipError: owners that are missing, unsorted, repeated or negative.
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
        if len(self._by_name) != len(self.params):
            seen: set[str] = set()
            twice = next(p.name for p in self.params if p.name in seen or seen.add(p.name))
            raise ManifestError(f"{twice!r} is listed twice: every name must be listed once")
        _ = self.groups  # raises when a group is not contiguous

    @cached_property
    def groups(self) -> tuple[GatherGroup, ...]:
        """The gather groups, in manifest order."""
        return gather_groups([param.name for param in self.params])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, order, dtypes, shapes, owners, placements and groups."""
        return digest_of("manifest", manifest_form(self))

    def param(self, name: str) -> ParamMeta:
        """The parameter called ``name``; raises `ManifestError` when there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise self._unknown(name) from None

    def group_of(self, name: str) -> int:
        """Index of the gather group of ``name``; raises `ManifestError` when unknown."""
        try:
            return self._group_by_name[name]
        except KeyError:
            raise self._unknown(name) from None

    @cached_property
    def _by_name(self) -> dict[str, ParamMeta]:
        return {param.name: param for param in self.params}

    @cached_property
    def _group_by_name(self) -> dict[str, int]:
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
    if param.owners[0] < 0 or any(a >= b for a, b in pairwise(param.owners)):
        raise OwnershipError(
            f"{param.name!r}: expected owner ranks ascending from 0 without repeats, "
            f"found {param.owners}"
        )
