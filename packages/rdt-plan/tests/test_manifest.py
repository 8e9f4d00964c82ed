from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import Manifest, ManifestError, OwnershipError, ParamMeta
from rdt_plan.testing import manifests

A = ParamMeta("l.0.a", "bfloat16", (4, 2), (0, 1))
B = ParamMeta("l.0.b", "float32", (3,), (1,))


def test_finds_params_and_groups() -> None:
    manifest = Manifest.build([A, B])
    assert manifest.param("l.0.b") is B
    assert manifest.group_of("l.0.b") == 0
    assert [group.names for group in manifest.groups] == [("l.0.a", "l.0.b")]
    assert (A.numel, A.num_bytes, ParamMeta("s", "int64", ()).num_bytes) == (8, 16, 8)


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
    ],
)
def test_bad_descriptions_are_refused(params, error, message) -> None:
    with pytest.raises(error, match=message):
        Manifest.build(params)


@given(manifests(), st.data())
def test_the_digest_changes_with_every_field(manifest: Manifest, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(manifest.params) - 1))
    param = manifest.params[index]
    changed = data.draw(
        st.sampled_from(
            [
                replace(param, name=param.name + "x"),
                replace(param, dtype="uint16"),
                replace(param, shape=(*param.shape, 1)),
                replace(param, owners=(*param.owners, 9)),
                replace(param, mesh_shape=(2,)),
                replace(param, placements=("Shard(0)",)),
            ]
        )
    )
    params = [*manifest.params[:index], changed, *manifest.params[index + 1 :]]
    assert Manifest.build(params).digest != manifest.digest
    assert Manifest.build(manifest.params).digest == manifest.digest
    assert len(manifest.digest) == 64


def test_the_digest_depends_on_order() -> None:
    assert Manifest.build([A, B]).digest != Manifest.build([B, A]).digest
