"""What a safetensors file says of itself: its tensors, and where in the file each lies."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from rdt_trainer.errors import SourceError

__all__ = ["StoredTensor", "parse_json", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""What the format allows; a longer one is no header."""

MAX_ELEMENTS = 2**63 - 1
"""What torch can count, also where an extent is 0."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, contiguous: its bytes are ``begin`` to ``end`` of the whole file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_aligned(self) -> bool:
        """Whether it can be used where the file is mapped."""
        return self.begin % self.dtype.itemsize == 0


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the file's order.

    Raises:
        SourceError: the file cannot be read, is no safetensors file, is cut short, has bytes of no
            tensor or of two, or holds a name twice or a dtype that is not served; names file and
            tensor.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if num_bytes >= 8 + length <= MAX_HEADER_BYTES else None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    if text is None:
        raise SourceError(
            f"{path} is no safetensors file: it announces a header of {length} bytes, and has "
            f"{num_bytes} bytes in all; it may have been downloaded in part"
        )
    header = parse_json(path, text)
    header.pop("__metadata__", None)
    data = 8 + length
    found = {name: _stored(path, name, entry, data, num_bytes) for name, entry in header.items()}
    _check_covered(path, found, data, num_bytes)
    return found


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``; `SourceError` naming ``path`` for anything else."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise SourceError(f"{path} names {twice} twice: expected each name once")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} does not hold the JSON it should: {error}") from error
    if not isinstance(parsed, dict):
        raise SourceError(f"{path} holds a JSON {type(parsed).__name__}: expected an object")
    return parsed


def _stored(path: Path, name: str, entry: Any, data: int, num_bytes: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(type(each) is int for each in (*shape, begin, end))
            and min(shape, default=0) >= 0
            and prod(extent or 1 for extent in shape) <= MAX_ELEMENTS
        ):
            pass
        case _:
            raise SourceError(
                f"{path}: {name} is described as {json.dumps(entry)[:200]}: expected dtype, shape "
                "and data_offsets"
            )
    if dtype not in _DTYPES:
        raise SourceError(
            f"{path}: {name} has dtype {dtype}, which is not served: expected one of "
            f"{', '.join(_DTYPES)}; convert the checkpoint"
        )
    stored = StoredTensor(_DTYPES[dtype], tuple(shape), data + begin, data + end)
    if end - begin != prod(shape) * stored.dtype.itemsize or begin < 0:
        raise SourceError(
            f"{path}: {name} is {dtype}{shape}, and lies in bytes {begin} to {end}: expected "
            f"{prod(shape) * stored.dtype.itemsize} bytes; the file is damaged"
        )
    if stored.end > num_bytes:
        raise SourceError(
            f"{path} is cut short: {name} ends at byte {stored.end}, the file at {num_bytes}; "
            "download it again"
        )
    return stored


def _check_covered(
    path: Path, tensors: Mapping[str, StoredTensor], data: int, num_bytes: int
) -> None:
    """Each byte after the header is of one tensor: the format says so, and damage shows by it."""
    at, before = data, "the header"
    for name, stored in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if stored.begin != at:
            raise SourceError(
                f"{path}: {name} begins at byte {stored.begin} of the file, and {before} ends at "
                f"{at}: expected one to follow the other; the file is damaged"
            )
        at, before = stored.end, name
    if at != num_bytes:
        raise SourceError(
            f"{path} has {num_bytes} bytes, and {before} ends at {at}: expected nothing after its "
            "tensors; the file is damaged"
        )
