"""A weight source over a checkpoint on disk: safetensors files, mapped into memory."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch

from rdt_plan.groups import group_ordered
from rdt_trainer.errors import SettingsError, SourceError
from rdt_trainer.mapped_file import MappedFile
from rdt_trainer.safetensors_header import StoredTensor, parse_json, read_header
from rdt_trainer.source import SourceMeta

__all__ = ["SafetensorsSource"]

INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsSource:
    """A `rdt_trainer.WeightSource` of the tensors of a checkpoint, under the names they have there.

    The files are mapped, so nothing is read before a worker pulls it, and nothing is copied. They
    must not be changed meanwhile: a checkpoint is replaced by another folder, or by renaming. A
    file that was written to is a `SourceError` wherever its tensors are asked for.

    Args:
        path: a folder with one ``*.safetensors.index.json`` or one ``*.safetensors``; or either of
            the two files.
        device: where tensors are served from. Other than "cpu", each is copied there in every pass.
        stable: offer the mapped tensors as stable ones, which workers may read where they are. Off:
            they pass through slots, and only what is being packed is read from disk. Over RDMA
            the former takes as much memory as the checkpoint, which registering pins.

    Attributes:
        files: the files with tensors, in order.
        num_bytes: of all tensors.

    Raises:
        SettingsError: a device that torch does not know.
        SourceError: no checkpoint is there, a shard is missing, the index and the files disagree,
            a file is damaged, or a dtype is not served. Names the file, and the tensor.
    """

    def __init__(
        self, path: Path | str, *, device: torch.device | str = "cpu", stable: bool = True
    ) -> None:
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise SettingsError(f"device is {device!r}: expected 'cpu' or 'cuda'") from error
        self._stable = stable and self._device.type == "cpu"
        tensors = _tensors_of(Path(path))
        if not tensors:
            raise SourceError(f"{path} holds no tensor: there is nothing to serve")
        self._tensors = {name: tensors[name] for name in group_ordered(tensors)}
        self.files: tuple[Path, ...] = tuple(dict.fromkeys(file for file, _ in tensors.values()))
        self.num_bytes = sum(stored.end - stored.begin for _, stored in tensors.values())
        self._mapped = {file: MappedFile(file) for file in self.files}

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        """Every tensor, group by group."""
        return [
            SourceMeta(name, stored.dtype, stored.shape)
            for name, (_, stored) in self._tensors.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over all tensors; see `WeightSource.iter_full`."""
        return self.iter_rest(())

    def iter_rest(self, stable: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the other names; see `StablePasses`."""
        for name in self._tensors:
            if name not in stable:
                yield name, self.tensor(name).to(self._device)

    def stable_tensors(self) -> Mapping[str, torch.Tensor]:
        """What can be read where the files are mapped; the same mapping each time."""
        self.check_unchanged()
        return self._stable_tensors

    def check_unchanged(self) -> None:
        """Raises `SourceError` when a file was written to since this source was made."""
        for file in self._mapped.values():
            file.check_unchanged()

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU: where the file is mapped, or a copy where that is unaligned.

        Raises `KeyError` for a name that the checkpoint has not, and `SourceError` where the file
        was changed.
        """
        file, stored = self._tensors[name]
        self._mapped[file].check_unchanged()  # reading what was cut off would end the process
        held = self._mapped[file].bytes[stored.begin : stored.end]
        return (held if stored.is_aligned else held.clone()).view(stored.dtype).view(stored.shape)

    @cached_property
    def _stable_tensors(self) -> Mapping[str, torch.Tensor]:
        aligned = [name for name, (_, stored) in self._tensors.items() if stored.is_aligned]
        return {name: self.tensor(name) for name in aligned} if self._stable else {}


def _tensors_of(path: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """By name, the file that holds the tensor, and where."""
    if path.is_dir():
        path = _file_of(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _sharded(path)
    return {name: (path, stored) for name, stored in read_header(path).items()}


def _file_of(folder: Path) -> Path:
    for pattern in (f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise SourceError(
                f"{folder} holds {len(found)} files {pattern}, {found[0].name} and {found[1].name} "
                "among them: expected one checkpoint, as one file, or as shards with one index "
                f"*{INDEX_SUFFIX}; name the file that is meant"
            )
    raise SourceError(
        f"{folder} is no checkpoint that can be served: expected a *.safetensors or a "
        f"*{INDEX_SUFFIX} in it"
    )


def _sharded(index: Path) -> dict[str, tuple[Path, StoredTensor]]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise SourceError(f"{index} cannot be read: {error}") from error
    named = parse_json(index, text).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise SourceError(f"{index} has no weight_map: expected an object of names and file names")
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for shard in dict.fromkeys(named.values()):
        file = index.parent / shard
        if file.parent != index.parent or not file.is_file():
            first = next(name for name in named if named[name] == shard)
            raise SourceError(
                f"{index} says that {first} is in {shard}: expected that file beside it; the "
                "shard is missing"
            )
        for name, stored in read_header(file).items():
            if name in tensors:
                raise SourceError(
                    f"{name} is in {tensors[name][0].name} and in {shard} of {index.parent}: "
                    "expected each name once"
                )
            if named.get(name) != shard:
                said = f"in {named[name]}" if name in named else "nowhere"
                raise SourceError(
                    f"{file} holds {name}, which is {said} after {index.name}: index and files "
                    "are not of one checkpoint"
                )
            tensors[name] = (file, stored)
    for name, shard in named.items():
        if name not in tensors:
            raise SourceError(
                f"{index} says that {name} is in {shard}, which does not hold it: index and files "
                "are not of one checkpoint"
            )
    return tensors
