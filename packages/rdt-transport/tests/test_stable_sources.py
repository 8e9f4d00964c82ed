import logging

import pytest
import torch

from rdt_plan import Manifest, ManifestError, ParamMeta, SliceError
from rdt_transport import stable_sources
from rdt_transport.stable_sources import StableSources

NAMES = ("embed", "layers.0.w", "layers.0.b", "layers.1.w")
MANIFEST = Manifest.build([ParamMeta(name, "float32", (4, 2)) for name in NAMES])


def tensors_of(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(4, 2) for name in names}


def test_each_tensor_is_told_with_its_place_in_the_manifest_and_its_storage_once() -> None:
    flat = torch.zeros(16)
    tensors = {"layers.1.w": flat[8:].view(4, 2), "layers.0.b": flat[:8].view(4, 2)}
    tensors["embed"] = torch.zeros(4, 2)

    found = StableSources(MANIFEST, 0, tensors, "cpu")

    rows = [(0, tensors["embed"]), (2, tensors["layers.0.b"]), (3, tensors["layers.1.w"])]
    assert [tuple(region) for region in found.regions] == [
        (param, tensor.data_ptr(), 0) for param, tensor in rows
    ]
    assert found.names == {"embed", "layers.0.b", "layers.1.w"}
    storages = [buffer.untyped_storage().data_ptr() for buffer in found.buffers]
    assert storages == [tensors["embed"].data_ptr(), flat.data_ptr()]


def test_a_group_stands_when_all_of_it_that_the_rank_holds_is_stable() -> None:
    group_of = MANIFEST.group_of
    found = StableSources(MANIFEST, 0, tensors_of("embed", "layers.0.w", "layers.1.w"), "cpu")
    assert found.groups.keys() == {group_of("embed"), group_of("layers.1.w")}
    assert StableSources(MANIFEST, 0, tensors_of(*NAMES), "cpu").groups.keys() == {
        group_of(name) for name in NAMES
    }
    assert not StableSources(MANIFEST, 0, {}, "cpu").groups


def test_what_others_hold_does_not_keep_a_group_from_standing() -> None:
    owners = ((0,), (1,), (0,), (0, 1))
    params = [ParamMeta(n, "float32", (4, 2), o) for n, o in zip(NAMES, owners, strict=True)]
    manifest = Manifest.build(params)
    found = StableSources(manifest, 0, tensors_of("embed", "layers.0.b"), "cpu")
    assert found.groups.keys() == {manifest.group_of("embed"), manifest.group_of("layers.0.b")}


def test_what_is_checked_is_the_registered_memory() -> None:
    tensors = tensors_of("embed", "layers.0.w")
    found = StableSources(MANIFEST, 0, tensors, "cpu")

    assert found.checked("embed", tensors["embed"]).data_ptr() == tensors["embed"].data_ptr()
    other = torch.ones(4, 2)
    assert found.checked("layers.1.w", other) is not None  # not stable: any tensor will do
    for wrong in (
        other,
        tensors["embed"].view(8),
        tensors["embed"].t(),
        tensors["embed"].view(torch.int32),
        tensors["layers.0.w"],
    ):
        with pytest.raises(
            SliceError, match=r"embed: producer 0 registered torch\.float32\[4, 2\]"
        ):
            found.checked("embed", wrong)
    with pytest.raises(SliceError, match=r"layers\.1\.w: the manifest says"):
        found.checked("layers.1.w", torch.zeros(3))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (torch.zeros(2, 4).t(), r"embed: a stable tensor must be contiguous, .* strides \(1, 4\)"),
        (torch.zeros(4, 2, dtype=torch.int32), r"embed: the manifest says float32\[4, 2\]"),
        (torch.zeros(4, 3), r"embed: the manifest says float32\[4, 2\]"),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_refused(wrong: torch.Tensor, reason: str) -> None:
    with pytest.raises(SliceError, match=reason):
        StableSources(MANIFEST, 0, {"embed": wrong}, "cpu")


def test_a_name_that_is_not_in_the_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match="embedding"):
        StableSources(MANIFEST, 0, tensors_of("embedding"), "cpu")


def test_a_tensor_with_a_negative_bit_is_refused() -> None:
    lazy = torch.zeros(4, 2, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    manifest = Manifest.build([ParamMeta("embed", "float32", (4, 2))])
    with pytest.raises(SliceError, match="embed: a stable tensor must be contiguous"):
        StableSources(manifest, 0, {"embed": lazy}, "cpu")


def test_a_piece_over_a_mesh_is_stable_too() -> None:
    param = ParamMeta("w", "float32", (4, 2), (0, 1), (2,), ("shard(0)",))
    manifest = Manifest.build([param])
    piece = torch.zeros(2, 2)

    assert StableSources(manifest, 1, {"w": piece}, "cpu").names == {"w"}
    with pytest.raises(SliceError, match="w: the manifest says"):
        StableSources(manifest, 1, {"w": torch.zeros(4, 2)}, "cpu")


def test_what_cannot_be_registered_goes_through_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stable_sources, "MAX_SOURCE_REGIONS", 2)
    tensors = tensors_of("embed", "layers.0.w", "layers.0.b")
    tensors["layers.1.w"] = tensors["embed"]  # of a storage that is registered anyway
    with caplog.at_level(logging.WARNING):
        found = StableSources(MANIFEST, 0, tensors, "cpu")
    assert found.names == {"embed", "layers.0.w", "layers.1.w"}
    assert "layers.0.b and 0 more go through slots: at most 2 allocations" in caplog.text
    with caplog.at_level(logging.WARNING):
        assert not StableSources(MANIFEST, 0, tensors, "cuda:1").names
    assert "they lie on cpu, and this producer serves memory of cuda:1" in caplog.text
    monkeypatch.setattr(stable_sources, "is_registrable", lambda tensor: False)
    with caplog.at_level(logging.WARNING):
        assert not StableSources(MANIFEST, 0, tensors, "cpu").names
    assert "they lie in virtual memory, which cannot be registered; unset" in caplog.text


def test_the_limit_is_one_of_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of("embed", "layers.0.w", "layers.0.b")
    alone = tensors["layers.0.b"].data_ptr()
    monkeypatch.setattr(stable_sources, "MAX_SOURCE_REGIONS", 1)
    monkeypatch.setattr(
        stable_sources,
        "allocation_of",
        lambda storage: (storage.data_ptr(), 32) if storage.data_ptr() == alone else (1, 1 << 60),
    )
    found = StableSources(MANIFEST, 0, tensors, "cpu")
    assert found.names == {"embed", "layers.0.w"}
    assert len(found.buffers) == 2  # both are held by the wire


def test_a_standing_group_is_what_its_chunks_are_packed_from() -> None:
    tensors = tensors_of(*NAMES)
    found = StableSources(MANIFEST, 0, tensors, "cpu")
    group = MANIFEST.group_of("layers.0.w")
    assert {name: t.data_ptr() for name, t in found.groups[group].items()} == {
        name: tensors[name].data_ptr() for name in ("layers.0.w", "layers.0.b")
    }


@pytest.mark.parametrize("change", ["replaced", "gone", "in another shape", "in another dtype"])
def test_sources_are_looked_at_when_their_mapping_is_another_one(change: str) -> None:
    tensors = tensors_of(*NAMES)
    found = StableSources(MANIFEST, 0, tensors, "cpu")
    found.check(dict(tensors))  # the same tensors
    others = dict(tensors)
    match change:
        case "replaced":
            others["layers.0.b"] = torch.zeros(4, 2)
        case "gone":
            del others["layers.0.b"]
        case "in another shape":
            others["layers.0.b"] = tensors["layers.0.b"].view(2, 4)
        case _:
            others["layers.0.b"] = tensors["layers.0.b"].view(torch.int32)
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(SliceError, match=r"layers\.0\.b: producer 0 .*make the trainer anew"):
            found.check(others)
    found.check(tensors)
    found.check(tensors_ahead := dict(tensors))
    tensors_ahead["embed"] = torch.zeros(4, 2)
    found.check(tensors_ahead)  # the very mapping: its owner says that nothing changed


def test_what_is_stable_and_not_registered_is_no_source() -> None:
    tensors = tensors_of("embed") | {"layers.0.b": torch.zeros(0)}
    manifest = Manifest.build(
        [ParamMeta("embed", "float32", (4, 2)), ParamMeta("layers.0.b", "float32", (0,))]
    )
    found = StableSources(manifest, 0, tensors, "cpu")
    assert found.groups.keys() == {manifest.group_of("embed")}
    found.check({"embed": tensors["embed"]})
