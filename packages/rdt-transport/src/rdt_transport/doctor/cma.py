"""Cross-memory attach: whether the kernel lets this process copy out of another one's memory."""

import ctypes
import errno
import os

__all__ = ["copy_refusal"]


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def copy_refusal(pid: int, address: int) -> str | None:
    """Copy one byte from ``address`` of process ``pid``, as UCX's cma does.

    None when that works; otherwise the kernel's error, as "EPERM: Operation not permitted".
    """
    landing = ctypes.create_string_buffer(1)
    here = _Span(ctypes.addressof(landing), 1)
    there = _Span(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    copied = libc.process_vm_readv(
        pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0
    )
    if copied == 1:
        return None
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
