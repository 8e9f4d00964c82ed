"""Whether memory can be registered, so that peers read it: not what lies in virtual memory."""

import ctypes
from functools import cache
from typing import Any

import torch

__all__ = ["VIRTUAL_MEMORY_REMEDY", "is_registrable"]

VIRTUAL_MEMORY_REMEDY = (
    "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, and allocate "
    "outside of allocators that can sleep"
)

_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # CUpointer_attribute


def is_registrable(tensor: torch.Tensor) -> bool:
    """False for memory of a GPU that came from an allocator of virtual memory.

    Expandable segments and allocators that can sleep are such: the driver does not share their
    memory between processes as a whole, and registering it fails. Where the driver does not say,
    the answer is True, and registering shows.
    """
    if tensor.device.type != "cuda" or tensor.untyped_storage().nbytes() == 0:
        return True
    ask = _ask()
    if ask is None:
        return True
    answer = ctypes.c_uint64(0)
    address = ctypes.c_uint64(tensor.untyped_storage().data_ptr())
    error = ask(ctypes.byref(answer), ctypes.c_int(_IS_LEGACY_CUDA_IPC_CAPABLE), address)
    return error != 0 or answer.value != 0


@cache
def _ask() -> Any:
    """``cuPointerGetAttribute`` of the driver; None without one."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
