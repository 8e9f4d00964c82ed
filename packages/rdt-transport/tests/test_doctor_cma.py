import ctypes
import os
import subprocess
import sys

from rdt_transport.doctor.cma import copy_refusal


def test_what_this_process_holds_can_be_copied() -> None:
    held = ctypes.create_string_buffer(b"x")

    assert copy_refusal(os.getpid(), ctypes.addressof(held)) is None


def test_the_kernels_refusal_is_named() -> None:
    refusal = copy_refusal(os.getpid(), 16)

    assert refusal is not None and refusal.startswith("EFAULT: ")


def test_a_process_that_is_gone_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    refusal = copy_refusal(child.pid, 16)

    assert refusal is not None and refusal.startswith("ESRCH: ")
