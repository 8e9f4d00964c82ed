"""Which UCX transport carries reads, out of what UCX itself says in the reading process."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

__all__ = ["ReadPath", "log_transports", "read_path", "read_paths", "read_transport"]

_READ = re.compile(r"remote memory read by ucp_get\S* into (\S.*?) from (\S+)")
_LARGEST = re.compile(r"\|\s*\S+\.\.inf\s*\|\s*(\S[^|]*?)\s*\|\s*(\S[^|]*?)\s*\|")
_TRANSPORT = re.compile(r"([a-z]\w*)/")


@dataclass(frozen=True, slots=True)
class ReadPath:
    """How one way of reads is carried when they are large.

    Attributes:
        into_host: whether they land in memory of the host, and not of a GPU.
        from_host: whether they come from memory of the host.
        transport: UCX's name, as ``cma``; several are joined by ``+``.
        how: UCX's word for it, as ``zero-copy`` or ``software emulation``.
    """

    into_host: bool
    from_host: bool
    transport: str
    how: str

    @property
    def is_emulated(self) -> bool:
        """Whether the source's processor has to answer every piece, instead of nobody there."""
        return "emulation" in self.how


def log_transports(folder: Path) -> None:
    """Have UCX write its choices into ``folder``; before any agent of any process is made."""
    os.environ["UCX_PROTO_INFO"] = "y"
    os.environ["UCX_LOG_FILE"] = str(folder / "ucx-%p.log")


def read_paths(text: str) -> Iterator[ReadPath]:
    """Every way of reads in a log of UCX, which prints a table each time it sets one up."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if read := _READ.search(line):
            table = takewhile(lambda row: "|" in row, lines[number + 4 :])
            for row in filter(None, map(_LARGEST.search, table)):
                names = dict.fromkeys(_TRANSPORT.findall(row[2]))
                into_host, from_host = (side.startswith("host") for side in read.groups())
                yield ReadPath(into_host, from_host, "+".join(names), row[1])


def read_path(text: str, *, into_host: bool = True, from_host: bool = True) -> ReadPath | None:
    """The last way of reads between those kinds of memory; None when UCX said nothing.

    The last one is the peer's: before it, UCX sets up how a process reads its own memory.
    """
    wanted = (into_host, from_host)
    found = [path for path in read_paths(text) if (path.into_host, path.from_host) == wanted]
    return found[-1] if found else None


def read_transport(folder: Path, pid: int) -> str:
    """What carries a large read of host memory by process ``pid``, as ``cma``; or "unknown"."""
    path = read_path((folder / f"ucx-{pid}.log").read_text())
    return path.transport if path else "unknown"
