import pytest
from hypothesis import given

from rdt_plan import Manifest, Ownership, OwnershipError, ParamMeta
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
    for param in manifest.params:
        assert ownership.owner_sets[ownership.set_of(param.name)] == param.owners
    assert len(set(ownership.owner_sets)) == len(ownership.owner_sets)


@pytest.mark.parametrize("field", [{"mesh_shape": (2,)}, {"placements": ("Shard(0)",)}])
def test_a_placement_over_a_mesh_is_refused_by_name(field) -> None:
    manifest = Manifest.build(
        [ParamMeta("a", "int8", (4,)), ParamMeta("b", "int8", (4,), (0, 1), **field)]
    )
    with pytest.raises(OwnershipError, match=r"'b': .*cannot be expressed yet.*gather it whole"):
        Ownership.of(manifest)


def test_an_unknown_name_is_held_by_no_rank() -> None:
    ownership = Ownership.of(Manifest.build([ParamMeta("a", "int8", (4,))]))
    with pytest.raises(OwnershipError, match="'z' is held by no rank"):
        ownership.set_of("z")
