"""A file mapped into memory, and whether it is still the one that was."""

import mmap
import os
import weakref
from functools import cached_property
from pathlib import Path

import torch

from rdt_trainer.errors import SourceError

__all__ = ["MappedFile"]


class MappedFile:
    """One file, open from construction: renaming another over it changes nothing here.

    Raises `SourceError` when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._stat()

    @cached_property
    def bytes(self) -> torch.Tensor:
        """All of it, uint8, 1-D, on the CPU, as one storage: it is registered once."""
        # A private mapping, as torch warns of memory that cannot be written to.
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def check_unchanged(self) -> None:
        """Raises `SourceError` when its size or its time of writing is another than at first."""
        if (found := self._stat()) != self._state:
            raise SourceError(
                f"{self._path} was written to while it was served: it had {self._state[0]} bytes, "
                f"and has {found[0]}: workers may have read some of both; replace a checkpoint by "
                "another folder, or by renaming, and push it again"
            )

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns
