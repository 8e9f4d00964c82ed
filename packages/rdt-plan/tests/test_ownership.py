import pytest
from hypothesis import given

from rdt_plan import Box, Manifest, Ownership, OwnershipError, ParamMeta
from rdt_plan.testing import manifests


def test_sets_are_numbered_by_first_appearance() -> None:
    owners = [(1,), (0, 1), (1,), (0,)]
    manifest = Manifest.build(ParamMeta(f"l.{i}.w", "int8", (1,), o) for i, o in enumerate(owners))
    ownership = Ownership.of(manifest)
    assert ownership.owner_sets == ((1,), (0, 1), (0,))
    assert [ownership.set_of(p.name) for p in manifest.params] == [0, 1, 0, 2]


@given(manifests())
def test_agrees_with_the_manifest(manifest: Manifest) -> None:
    ownership = Ownership.of(manifest)
    assert manifest.ownership == ownership
    assert len(set(ownership.owner_sets)) == len(ownership.owner_sets)
    for group in manifest.groups:
        params = [manifest.param(name) for name in group.names]
        for param in params:
            if not param.mesh_shape:
                assert ownership.owner_sets[ownership.set_of(param.name)] == param.owners
                continue
            boxes: dict[Box | None, list[int]] = {}
            for rank in param.owners:
                boxes.setdefault(param.box(rank), []).append(rank)
            boxes.pop(None, None)
            grid, sets = param.grid, ownership.sets_by_cell[param.name]
            assert grid is not None
            found = {grid.box(cell): ownership.owner_sets[each] for cell, each in sets.items()}
            assert found == {box: tuple(sorted(ranks)) for box, ranks in boxes.items()}
        holders = {rank for param in params for rank in param.holders}
        assert ownership.ranks_of(group.index) == holders


def test_every_box_has_its_owner_set_and_equal_ones_are_one() -> None:
    hsdp = ("replicate", "shard(0)")
    params = [
        ParamMeta("a", "int8", (4,), (0, 1), (2,), ("shard(0)",)),
        ParamMeta("l.0.b", "int8", (4, 2), (0, 1, 2, 3), (2, 2), hsdp),
        ParamMeta("l.0.c", "int8", (1, 2), (3, 1, 2, 0), (2, 2), hsdp),
        ParamMeta("l.1.d", "int8", (4,), (0,)),
    ]
    ownership = Ownership.of(Manifest.build(params))
    assert ownership.owner_sets == ((0,), (1,), (0, 2), (1, 3), (2, 3))
    assert ownership.sets_by_cell == {
        "a": {(0,): 0, (1,): 1},
        "l.0.b": {(0, 0): 2, (1, 0): 3},
        "l.0.c": {(0, 0): 4},  # 1 and 0 hold nothing of it
    }
    assert ownership.sets_by_group == ((0, 1), (2, 3, 4), (0,))
    assert ownership.turns == {(0, 0): 0, (1, 0): 0, (2, 1): 0, (3, 1): 0, (4, 1): 0, (0, 2): 1}
    assert ownership.ranks_of(0) == {0, 1}


def test_an_unknown_name_is_held_by_no_rank() -> None:
    ownership = Ownership.of(Manifest.build([ParamMeta("a", "int8", (4,))]))
    with pytest.raises(OwnershipError, match="'z' is held whole by no rank"):
        ownership.set_of("z")
