"""What the driver of a GPU says of memory: whether it can be registered, and what holds it.

Memory that peers read is registered by whole allocations: torch cuts many tensors out of one.
"""

import ctypes
from functools import cache
from typing import Any

import torch

__all__ = ["VIRTUAL_MEMORY_REMEDY", "allocation_of", "is_registrable"]

VIRTUAL_MEMORY_REMEDY = (
    "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, and allocate "
    "outside of allocators that can sleep"
)

# CUpointer_attribute
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_RANGE_START_ADDR = 11
_RANGE_SIZE = 12


def is_registrable(tensor: torch.Tensor) -> bool:
    """False for memory of a GPU that came from an allocator of virtual memory.

    Expandable segments and allocators that can sleep are such: the driver does not share their
    memory between processes as a whole, and registering it fails. Where the driver does not say,
    the answer is True, and registering shows.
    """
    if tensor.device.type != "cuda" or tensor.untyped_storage().nbytes() == 0:
        return True
    return _attribute(tensor.untyped_storage().data_ptr(), _IS_LEGACY_CUDA_IPC_CAPABLE) != 0


def allocation_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """(address, bytes) of the driver's allocation that ``storage`` was cut from.

    It stays as long as the storage is held. Memory of the host is its own allocation, and so is
    what the driver does not place in one range.
    """
    address, num_bytes = storage.data_ptr(), storage.nbytes()
    if storage.device.type == "cuda" and num_bytes:
        start = _attribute(address, _RANGE_START_ADDR)
        size = _attribute(address, _RANGE_SIZE)
        if start and size and start <= address and address + num_bytes <= start + size:
            return start, size
    return address, num_bytes


def _attribute(address: int, attribute: int) -> int | None:
    """An attribute of a pointer; None where the driver does not say."""
    ask = _ask()
    if ask is None:
        return None
    answer = ctypes.c_uint64(0)
    error = ask(ctypes.byref(answer), ctypes.c_int(attribute), ctypes.c_uint64(address))
    return None if error else answer.value


@cache
def _ask() -> Any:
    """``cuPointerGetAttribute`` of the driver; None without one."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
