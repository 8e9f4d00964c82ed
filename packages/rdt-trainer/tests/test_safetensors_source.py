import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rdt_plan import Manifest
from rdt_trainer import RdtTrainer, SafetensorsSource, SettingsError, SourceError
from rdt_trainer.safetensors_header import read_header
from rdt_trainer.source import adapt
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire

INDEX = "model.safetensors.index.json"
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.complex64,
)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape_of_bytes = (*shape, dtype.itemsize)
    found = torch.randint(0, 256, shape_of_bytes, dtype=torch.uint8, generator=generator)
    return (found % 2 if dtype == torch.bool else found).view(dtype).view(shape)


def tensors() -> dict[str, torch.Tensor]:
    """Out of group order, and with a tensor of each odd kind."""
    return {
        "model.norm.weight": drawn((6,), torch.bfloat16, 1),
        "model.layers.1.w": drawn((3, 5), torch.float32, 2),
        "model.embed.weight": drawn((7, 4), torch.bfloat16, 3),
        "model.layers.0.w": drawn((3, 5), torch.float32, 4),
        "model.layers.0.scale": drawn((), torch.float32, 5),
        "model.layers.1.empty": drawn((0, 4), torch.float16, 6),
    }


def write_shards(
    folder: Path, shards: dict[str, list[str]], held: dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    held = held or tensors()
    for file, names in shards.items():
        save_file({name: held[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_sharded(folder: Path) -> Path:
    names = list(tensors())
    return write_shards(folder, {"a.safetensors": names[:2], "b.safetensors": names[2:]})


def write_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    as_bytes = [each.contiguous().view(-1).view(torch.uint8) for each in (found, expected)]
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and as_bytes[0].equal(as_bytes[1])
    )


def check(source: SafetensorsSource, expected: dict[str, torch.Tensor]) -> None:
    passed = dict(source.iter_full())
    assert list(passed) == [meta.name for meta in source.metadata]
    assert passed.keys() == expected.keys()
    assert all(same(passed[name], expected[name]) for name in expected)
    Manifest.build(adapt(source).params)  # whose groups must be contiguous


def test_a_file_a_folder_and_shards_are_one_checkpoint(tmp_path):
    single = tmp_path / "single"
    single.mkdir()
    save_file(tensors(), single / "model.safetensors")
    sharded = write_sharded(tmp_path / "sharded")

    for path in (single, single / "model.safetensors", sharded, sharded / INDEX):
        source = SafetensorsSource(path)
        check(source, tensors())
        assert source.num_bytes == sum(tensor.nbytes for tensor in tensors().values())
    assert [file.name for file in source.files] == ["a.safetensors", "b.safetensors"]


@settings(max_examples=40)
@given(st.data())
def test_whatever_the_format_holds_is_read_as_it_was_written(tmp_path_factory, data):
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    names = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True))
    held = {
        f"layers.{name}": drawn(
            data.draw(shapes), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99))
        )
        for name in names
    }
    path = tmp_path_factory.mktemp("drawn") / "model.safetensors"
    save_file(held, path)
    check(SafetensorsSource(path), held)


def test_what_is_mapped_stays_and_is_registered_once_a_file(tmp_path):
    source = SafetensorsSource(write_sharded(tmp_path))
    stable = source.stable_tensors()
    assert stable is source.stable_tensors()
    assert stable.keys() == tensors().keys()
    assert len({each.untyped_storage().data_ptr() for each in stable.values()}) == 2
    assert all(stable[name].data_ptr() == each.data_ptr() for name, each in source.iter_full())
    assert list(source.iter_rest(stable.keys())) == []
    staged = SafetensorsSource(tmp_path, stable=False)
    assert staged.stable_tensors() == {}
    check(staged, tensors())


def test_unaligned_tensors_are_copied_in_every_pass(tmp_path):
    weight = drawn((4,), torch.float32)
    text = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    text += b" " * ((1 - len(text)) % 4)  # the format has writers align it; not all do
    path = write_file(tmp_path / "m.safetensors", text, weight.numpy().tobytes())
    source = SafetensorsSource(path)
    assert source.stable_tensors() == {}
    check(source, {"w": weight})


def test_workers_read_the_files_themselves(tmp_path):
    path = write_sharded(tmp_path)
    for stable in (True, False):
        client = TorchEngineClient(NixlWire, num_workers=2)
        source = SafetensorsSource(path, stable=stable)
        with RdtTrainer(source, client, unconsumed=["*.empty"]) as trainer:
            trainer.init()
            report = trainer.send_weights()
            for worker, found in enumerate(client.workers):
                for name, tensor in tensors().items():
                    assert same(found[name], client.shard(worker, tensor)), name
        assert (report.bytes_staged, report.bytes_direct)[stable] > 0
        assert (report.bytes_staged, report.bytes_direct)[not stable] == 0


def refusals(folder: Path) -> dict[str, Callable[[], object]]:
    """What is wrong, as a pattern of its message, by what makes it so."""

    def edited(change: Callable[[dict[str, str]], object]) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    def shard(text: str, data: bytes = b"") -> None:
        write_file(folder / "a.safetensors", text.encode(), data)

    def tensors_at(*offsets: tuple[int, int], num_bytes: int) -> Callable[[], None]:
        described = [
            (f"t{at}", {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]})
            for at, (begin, end) in enumerate(offsets)
        ]
        return lambda: shard(json.dumps(dict(described)), bytes(num_bytes))

    a = folder / "a.safetensors"
    norm = '"model.norm.weight": {"dtype": "BF16", "shape": [6], "data_offsets": [0, 12]}'
    return {
        r"model\.norm\.weight is in a\.safetensors.*missing": a.unlink,
        r"\.\./a\.safetensors.*missing": lambda: (
            edited(
                lambda names: names.update(dict.fromkeys(list(tensors())[:2], "../a.safetensors"))
            )
            or a.rename(folder.parent / a.name)
        ),
        r"new is in a\.safetensors, which does not hold it": lambda: edited(
            lambda names: names.update(new="a.safetensors")
        ),
        r"holds model\.norm\.weight, which is nowhere": lambda: edited(
            lambda names: names.pop("model.norm.weight")
        ),
        r"holds model\.norm\.weight, which is in b\.safetensors": lambda: edited(
            lambda names: names.update({"model.norm.weight": "b.safetensors"})
        ),
        r" is in a\.safetensors and in b\.safetensors": lambda: save_file(
            tensors(), folder / "b.safetensors"
        ),
        r"names model\.norm\.weight twice": lambda: shard(f"{{{norm}, {norm}}}", bytes(12)),
        r"model\.norm\.weight has dtype F4": lambda: shard(
            f"{{{norm.replace('BF16', 'F4')}}}", bytes(12)
        ),
        r"bytes 0 to 13: expected 12": lambda: shard(
            f"{{{norm.replace('12]', '13]')}}}", bytes(13)
        ),
        r"described as .*expected dtype": lambda: shard('{"model.norm.weight": {"dtype": "BF16"}}'),
        r"described as .*-6": lambda: shard(f"{{{norm.replace('[6]', '[-6]')}}}", bytes(12)),
        r"cut short: model\.norm\.weight ends": lambda: shard(f"{{{norm}}}", bytes(11)),
        r"described as .*18446744073709551616": lambda: shard(
            f"{{{norm.replace('[6]', '[18446744073709551616, 0]').replace('12]', '0]')}}}"
        ),
        r"described as .*true": lambda: shard(
            f"{{{norm.replace('[6]', '[0]').replace('[0, 12]', '[false, true]')}}}", bytes(1)
        ),
        r"t1 begins at .* t0 ends at .*damaged": tensors_at((0, 8), (4, 12), num_bytes=12),
        r"t1 begins at .* t0 ends at .* one to follow": tensors_at((0, 8), (9, 12), num_bytes=12),
        r"t0 begins at .* the header ends at": tensors_at((1, 8), num_bytes=8),
        r"t0 ends at .* nothing after": tensors_at((0, 8), num_bytes=9),
        r"does not hold the JSON.*recursion": lambda: shard("[" * 200_000),
        r"no safetensors file.*in part": lambda: a.write_bytes(a.read_bytes()[:20]),
        r"a\.safetensors does not hold the JSON": lambda: shard("{nothing"),
        r"a JSON list": lambda: shard("[]"),
        r"no weight_map": lambda: (folder / INDEX).write_text("{}"),
        r"does not hold the JSON it should": lambda: (folder / INDEX).write_text("{"),
    }


@pytest.mark.parametrize("pattern", list(refusals(Path())))
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(tmp_path, pattern):
    folder = write_sharded(tmp_path / "checkpoint")
    refusals(folder)[pattern]()
    with pytest.raises(SourceError, match=pattern):
        SafetensorsSource(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SourceError, match="no checkpoint that can be served"):
        SafetensorsSource(tmp_path)
    with pytest.raises(SourceError, match="cannot be read"):
        SafetensorsSource(tmp_path / "absent.safetensors")
    write_file(tmp_path / "model.safetensors", b"{}")
    with pytest.raises(SourceError, match="holds no tensor"):
        SafetensorsSource(tmp_path)
    save_file(tensors(), tmp_path / "consolidated.safetensors")
    with pytest.raises(SourceError, match=r"2 files .*consolidated.*name the file"):
        SafetensorsSource(tmp_path)
    check(SafetensorsSource(tmp_path / "consolidated.safetensors"), tensors())


def overwrite(file: Path, at: int = -1) -> None:
    with file.open("r+b") as opened:
        opened.seek(at, 2)
        (byte,) = opened.read(1)
        opened.seek(at, 2)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("change", [overwrite, lambda file: file.write_bytes(b""), Path.touch])
@pytest.mark.parametrize("stable", [True, False])
def test_a_file_that_is_written_to_is_found_before_its_bytes_are_taken(tmp_path, change, stable):
    write_sharded(tmp_path)
    os.utime(tmp_path / "b.safetensors", (1, 1))  # clocks of files are coarse
    source = SafetensorsSource(tmp_path, stable=stable)
    check(source, tensors())
    source.check_unchanged()
    change(tmp_path / "b.safetensors")
    takes = [source.check_unchanged, lambda: source.tensor("model.layers.0.w")]
    takes.append(source.stable_tensors if stable else lambda: list(source.iter_full()))
    for take in takes:
        with pytest.raises(SourceError, match=r"b\.safetensors was written to while"):
            take()
    assert same(source.tensor("model.norm.weight"), tensors()["model.norm.weight"])


def test_a_file_that_another_replaces_is_served_as_it_was(tmp_path):
    source = SafetensorsSource(write_sharded(tmp_path))
    (tmp_path / "new").write_bytes(b"another one")
    (tmp_path / "new").rename(tmp_path / "b.safetensors")
    check(source, tensors())
    source.check_unchanged()


def test_a_device_that_torch_does_not_know_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="device is 'foo'"):
        SafetensorsSource(write_sharded(tmp_path), device="foo")


def test_a_header_says_where_each_tensor_lies(tmp_path):
    save_file(tensors(), tmp_path / "m.safetensors", metadata={"format": "pt"})
    whole = (tmp_path / "m.safetensors").read_bytes()
    for name, stored in read_header(tmp_path / "m.safetensors").items():
        expected = tensors()[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert whole[stored.begin : stored.end] == expected
