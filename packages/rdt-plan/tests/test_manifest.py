from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Box, Manifest, ManifestError, OwnershipError, ParamMeta
from rdt_plan.testing import manifests

A = ParamMeta("l.0.a", "bfloat16", (4, 2), (0, 1))
B = ParamMeta("l.0.b", "float32", (3,), (1,))
C = ParamMeta("l.0.c", "int8", (5, 4), (3, 0, 2, 1), (2, 2), ("replicate", "shard(0)"))
WHOLE = "replicate"


def test_finds_params_and_groups() -> None:
    manifest = Manifest.build([A, B])
    assert manifest.param("l.0.b") is B
    assert manifest.group_of("l.0.b") == 0
    assert [group.names for group in manifest.groups] == [("l.0.a", "l.0.b")]
    assert (A.numel, A.num_bytes, ParamMeta("s", "int64", ()).num_bytes) == (8, 16, 8)


def test_what_each_rank_of_a_mesh_holds() -> None:
    boxes = {3: Box((0, 0), (3, 4)), 0: Box((3, 0), (2, 4))}
    assert [C.box(rank) for rank in (3, 0, 2, 1)] == [boxes[3], boxes[0], boxes[3], boxes[0]]
    assert C.holders == (3, 0, 2, 1)
    assert C.held_by(1) == ParamMeta("l.0.c", "int8", (2, 4), (1,))
    short = replace(C, shape=(1, 4))
    assert (short.holders, short.box(0), short.held_by(0)) == ((3, 2), None, None)
    assert C.box(4) is None
    assert (A.held_by(1), A.held_by(2), A.holders) == (A, None, (0, 1))
    assert A.box(0) == Box((0, 0), (4, 2))


@pytest.mark.parametrize("find", [Manifest.param, Manifest.group_of])
def test_an_unknown_name_is_named(find) -> None:
    with pytest.raises(ManifestError, match=r"'l\.9\.a' is not in the manifest of 1 parameters"):
        find(Manifest.build([A]), "l.9.a")


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ManifestError, "no parameters"),
        ([A, B, A], ManifestError, r"'l\.0\.a' is listed twice"),
        ([replace(A, name="")], ManifestError, "empty name"),
        ([replace(A, dtype="torch.float32")], ManifestError, r"'l\.0\.a': unknown dtype"),
        ([replace(A, shape=(2, -1))], ManifestError, r"'l\.0\.a': .*found \(2, -1\)"),
        ([replace(A, owners=())], OwnershipError, r"'l\.0\.a' is held by no rank"),
        ([replace(A, owners=(1, 0))], OwnershipError, r"'l\.0\.a': .*found \(1, 0\)"),
        ([replace(A, owners=(1, 1))], OwnershipError, r"found \(1, 1\)"),
        ([replace(A, owners=(-1, 0))], OwnershipError, r"found \(-1, 0\)"),
        ([A, replace(A, name="l.1.a"), B], ManifestError, "group_ordered"),
        ([replace(C, owners=(3, 0, 2, 3))], OwnershipError, r"found \(3, 0, 2, 3\)"),
        ([replace(C, owners=(3, 0, 2, -1))], OwnershipError, r"found \(3, 0, 2, -1\)"),
        ([replace(C, owners=(3, 0, 2))], OwnershipError, r"'l\.0\.c': expected one owner a pos"),
        ([replace(C, mesh_shape=(4,))], OwnershipError, r"one placement an axis.*mesh_shape=\(4,"),
        ([replace(C, mesh_shape=(2, 0))], OwnershipError, r"one owner a position"),
        ([replace(C, mesh_shape=(1 << 40,))], OwnershipError, r"one owner a position"),
        ([replace(C, mesh_shape=(-2, -2))], OwnershipError, r"extents from 1"),
        ([replace(C, owners=(0, 1), mesh_shape=())], OwnershipError, r"one owner a position"),
        ([replace(B, placements=(WHOLE,))], OwnershipError, r"one placement an axis"),
        ([replace(A, mesh_shape=(2,))], OwnershipError, r"'l\.0\.a': .*one placement an axis"),
        ([replace(C, placements=(WHOLE, "shard(2)"))], OwnershipError, r"to cut dims of shape=\(5"),
        ([replace(C, placements=(WHOLE, "Shard(0)"))], OwnershipError, r"found 'Shard\(0\)'"),
    ],
)
def test_bad_descriptions_are_refused(params, error, message) -> None:
    with pytest.raises(error, match=message):
        Manifest.build(params)


@given(manifests(), st.data())
def test_the_digest_changes_with_every_field(manifest: Manifest, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(manifest.params) - 1))
    param = manifest.params[index]
    if param.mesh_shape:
        others = [
            replace(param, owners=(*param.owners[1:], 9)),
            replace(param, owners=tuple(sorted(param.owners)), mesh_shape=(), placements=()),
            replace(
                param, mesh_shape=(*param.mesh_shape, 1), placements=(*param.placements, WHOLE)
            ),
        ]
    else:
        others = [
            replace(param, owners=(*param.owners, 9)),
            replace(param, mesh_shape=(len(param.owners),), placements=(WHOLE,)),
        ]
    others.append(replace(param, name=param.name + "x"))
    others.append(replace(param, dtype="uint16"))
    others.append(replace(param, shape=(*param.shape, 1)))
    changed = data.draw(st.sampled_from(others))
    params = [*manifest.params[:index], changed, *manifest.params[index + 1 :]]
    assert Manifest.build(params).digest != manifest.digest
    assert Manifest.build(manifest.params).digest == manifest.digest
    assert len(manifest.digest) == 64


def test_the_digest_depends_on_order() -> None:
    assert Manifest.build([A, B]).digest != Manifest.build([B, A]).digest
