"""Where in a loader something happened."""

import sys
from pathlib import Path

import torch

__all__ = ["loader_line", "raising_line"]

_QUIET_FOLDERS = tuple(f"{Path(each).parent}/" for each in (torch.__file__, __file__))


def loader_line() -> str:
    """``file:line`` of the innermost calling frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_QUIET_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame outside torch and this package that ``error`` left."""
    found, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_QUIET_FOLDERS):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
