"""Ownership: which producer ranks hold which name."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdt_plan.errors import OwnershipError

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest

__all__ = ["Ownership"]


@dataclass(frozen=True)
class Ownership:
    """Owner sets, numbered by first appearance so that every party derives the same table.

    Pipeline stages, experts and replicas are all just owner sets.

    Attributes:
        owner_sets: the distinct owner sets, each ascending.
        set_by_name: index into ``owner_sets`` of every name, in manifest order.
    """

    owner_sets: tuple[tuple[int, ...], ...]
    set_by_name: dict[str, int]

    @classmethod
    def of(cls, manifest: "Manifest") -> "Ownership":
        """Read the ownership off a manifest.

        Raises:
            OwnershipError: a parameter is placed over a mesh, which cannot be expressed yet.

        >>> from rdt_plan import Manifest, ParamMeta
        >>> params = [ParamMeta("a", "int8", (1,), (0, 1)), ParamMeta("b", "int8", (1,), (1,))]
        >>> ownership = Ownership.of(Manifest.build(params))
        >>> ownership.owner_sets, ownership.set_of("b")
        (((0, 1), (1,)), 1)
        """
        numbers: dict[tuple[int, ...], int] = {}
        set_by_name: dict[str, int] = {}
        for param in manifest.params:
            if param.mesh_shape or param.placements:
                raise OwnershipError(
                    f"{param.name!r}: a placement over a mesh cannot be expressed yet: expected "
                    f"mesh_shape=() and placements=(), found mesh_shape={param.mesh_shape} and "
                    f"placements={param.placements}; gather it whole on each of its owners"
                )
            set_by_name[param.name] = numbers.setdefault(param.owners, len(numbers))
        return cls(tuple(numbers), set_by_name)

    def set_of(self, name: str) -> int:
        """Number of the owner set of ``name``; raises `OwnershipError` when nobody holds it."""
        try:
            return self.set_by_name[name]
        except KeyError:
            raise OwnershipError(
                f"{name!r} is held by no rank: it is not in the manifest of "
                f"{len(self.set_by_name)} names"
            ) from None
