"""Which UCX transport carries reads, out of what UCX itself says in the reading process."""

import os
import re
from itertools import takewhile
from pathlib import Path

__all__ = ["log_transports", "read_transport"]

_READ = re.compile(r"remote memory read by ucp_get\S* into host memory from host")
_ROW = re.compile(r"\|\s*(\d+)\.\.(\S+)\s*\|[^|]*\|\s*(\S[^|]*?)\s*\|")


def log_transports(folder: Path) -> None:
    """Have UCX write its choices into ``folder``; before any agent of any process is made."""
    os.environ["UCX_PROTO_INFO"] = "y"
    os.environ["UCX_LOG_FILE"] = str(folder / "ucx-%p.log")


def read_transport(folder: Path, pid: int) -> str:
    """What carries a large read of process ``pid``, as ``cma``; "unknown" when UCX said nothing.

    UCX prints a table for each way it configures a connection; the last one of remote reads is
    the peer's.
    """
    lines = (folder / f"ucx-{pid}.log").read_text().splitlines()
    found = "unknown"
    for number, line in enumerate(lines):
        if _READ.search(line):
            table = takewhile(lambda row: "|" in row, lines[number + 4 :])
            ranges = {row[2]: row[3] for text in table if (row := _ROW.search(text))}
            found = ranges.get("inf", "unknown").split("/")[0]
    return found
