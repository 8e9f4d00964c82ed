"""Ownership: which producer ranks hold which name, or which box of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING

from rdt_plan.errors import OwnershipError
from rdt_plan.mesh import Cell

if TYPE_CHECKING:
    from rdt_plan.manifest import Manifest, ParamMeta

__all__ = ["Ownership"]


@dataclass(frozen=True)
class Ownership:
    """Owner sets, numbered by first appearance so that every party derives the same table.

    The ranks that hold one name whole are an owner set, and so are those that hold one box of it:
    pipeline stages, experts, replicas and shards are all just owner sets.

    Attributes:
        owner_sets: the distinct owner sets, each ascending.
        set_by_name: index into ``owner_sets`` of every name held whole, in manifest order.
        sets_by_cell: of every sharded name: that index by cell of its grid.
        sets_by_group: the owner sets that hold something of each gather group.
    """

    owner_sets: tuple[tuple[int, ...], ...]
    set_by_name: Mapping[str, int]
    sets_by_cell: Mapping[str, Mapping[Cell, int]]
    sets_by_group: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, manifest: "Manifest") -> "Ownership":
        """Read the ownership off a manifest.

        >>> from rdt_plan import Manifest, ParamMeta
        >>> params = [
        ...     ParamMeta("a", "int8", (4,), (0, 1)),
        ...     ParamMeta("b", "int8", (4,), (0, 1, 2, 3), (2, 2), ("replicate", "shard(0)")),
        ... ]
        >>> ownership = Ownership.of(Manifest.build(params))
        >>> ownership.owner_sets, ownership.set_by_name, ownership.sets_by_cell
        (((0, 1), (0, 2), (1, 3)), {'a': 0}, {'b': {(0,): 1, (1,): 2}})
        """
        numbers: dict[tuple[int, ...], int] = {}
        set_by_name: dict[str, int] = {}
        sets_by_cell: dict[str, Mapping[Cell, int]] = {}
        sets_by_group: list[tuple[int, ...]] = []
        # Names of one layer kind are cut alike, and neighbours mostly have the same owners.
        known: dict[tuple[int, ...], dict[object, Mapping[Cell, int]]] = {}
        cut: dict[object, Mapping[Cell, int]] = {}  # of names that have these owners:
        cut_owners = None
        params = iter(manifest.params)
        for group in manifest.groups:
            found: dict[int, None] = {}
            kinds: dict[int, Mapping[Cell, int]] = {}
            owners, number = None, -1
            for param in islice(params, len(group.names)):
                if param.mesh_shape:
                    if param.owners != cut_owners:
                        cut_owners = param.owners
                        cut = known.setdefault(cut_owners, {})
                    key = (param.shape, param.mesh_shape, param.placements)
                    cells = cut.get(key)
                    if cells is None:
                        cells = cut[key] = {
                            cell: numbers.setdefault(owners, len(numbers))
                            for cell, owners in _owners_by_cell(param).items()
                        }
                    sets_by_cell[param.name] = cells
                    kinds[id(cells)] = cells
                    continue
                if param.owners != owners:
                    owners = param.owners
                    number = numbers.setdefault(owners, len(numbers))
                    found[number] = None
                set_by_name[param.name] = number
            for cells in kinds.values():
                found.update(dict.fromkeys(cells.values()))
            sets_by_group.append(tuple(found))
        return cls(tuple(numbers), set_by_name, sets_by_cell, tuple(sets_by_group))

    @cached_property
    def turns(self) -> Mapping[tuple[int, int], int]:
        """For (owner set, group): how many earlier groups the owner set holds something of."""
        num_groups = [0] * len(self.owner_sets)
        turns = {}
        for group, sets in enumerate(self.sets_by_group):
            for number in sets:
                turns[number, group] = num_groups[number]
                num_groups[number] += 1
        return turns

    def set_of(self, name: str) -> int:
        """Number of the owner set that holds ``name`` whole; `OwnershipError` when none does."""
        try:
            return self.set_by_name[name]
        except KeyError:
            raise OwnershipError(
                f"{name!r} is held whole by no rank: expected one of {len(self.set_by_name)} names "
                f"of the manifest that no mesh cuts"
            ) from None

    def holders(self, name: str) -> frozenset[int]:
        """The ranks that hold something of ``name``; raises `OwnershipError` for an unknown one."""
        found = self.holders_by_name.get(name)
        return self._ranks[self.set_of(name)] if found is None else found

    @cached_property
    def holders_by_name(self) -> Mapping[str, frozenset[int]]:
        """The ranks that hold something of each name."""
        whole = map(self._ranks.__getitem__, self.set_by_name.values())
        cut = map(self._ranks_by_cells.__getitem__, map(id, self.sets_by_cell.values()))
        names = chain(self.set_by_name, self.sets_by_cell)
        return dict(zip(names, chain(whole, cut), strict=True))

    @cached_property
    def num_held(self) -> Counter[int]:
        """Of how many names each rank holds something."""
        num_held: Counter[int] = Counter()
        for owner_set, number in Counter(self.set_by_name.values()).items():
            num_held.update(dict.fromkeys(self._ranks[owner_set], number))
        for cells, number in Counter(map(id, self.sets_by_cell.values())).items():
            num_held.update(dict.fromkeys(self._ranks_by_cells[cells], number))
        return num_held

    @cached_property
    def _ranks(self) -> tuple[frozenset[int], ...]:
        return tuple(map(frozenset, self.owner_sets))

    @cached_property
    def _ranks_by_cells(self) -> Mapping[int, frozenset[int]]:
        """Names of one kind share their mapping of cells."""
        cut = self.sets_by_cell.values()
        kinds = dict(zip(map(id, cut), cut, strict=True))
        return {
            key: frozenset().union(*(self._ranks[number] for number in cells.values()))
            for key, cells in kinds.items()
        }

    def ranks_of(self, group: int) -> frozenset[int]:
        """The ranks that hold something of gather group ``group``."""
        return frozenset().union(*(self.owner_sets[number] for number in self.sets_by_group[group]))


def _owners_by_cell(param: "ParamMeta") -> dict[Cell, tuple[int, ...]]:
    """The ranks that hold each box of ``param``, ascending."""
    found: dict[Cell, list[int]] = {}
    if grid := param.grid:
        for rank, cell in zip(param.owners, grid.cells, strict=True):
            if cell is not None:
                found.setdefault(cell, []).append(rank)
    return {cell: tuple(sorted(ranks)) for cell, ranks in found.items()}
