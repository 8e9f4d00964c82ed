import os
from pathlib import Path

import pytest

from rdt_trainer.errors import SourceError
from rdt_trainer.mapped_file import MappedFile


def test_a_file_is_one_storage_that_outlives_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    mapped = MappedFile(path)
    path.unlink()
    found = mapped.bytes
    assert found is mapped.bytes
    mapped.check_unchanged()
    del mapped
    assert bytes(found.tolist()) == b"abc"


@pytest.mark.parametrize("content", [b"", b"abd", b"abcd"])
def test_whoever_writes_to_it_is_noticed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    os.utime(path, (1, 1))  # clocks of files are coarse
    mapped = MappedFile(path)
    path.write_bytes(content)
    with pytest.raises(SourceError, match=f"had 3 bytes, and has {len(content)}"):
        mapped.check_unchanged()


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="absent cannot be read"):
        MappedFile(tmp_path / "absent")
