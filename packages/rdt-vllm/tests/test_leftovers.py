"""Every kind of thing is left once, and named."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory

import pytest

from rdt_vllm.testing.leftovers import Footprint


@contextmanager
def a_thread() -> Iterator[str]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="rdt-left")
    thread.start()
    yield "thread rdt-left"
    release.set()
    thread.join()


@contextmanager
def a_process() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield f"process {process.pid}: {sys.executable} -c input()"
        process.communicate(b"\n")


@contextmanager
def a_port_of_a_process() -> Iterator[str]:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
    command = [sys.executable, "-c", code + "flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        yield f"port {int(process.stdout.readline())} of process {process.pid}"
        process.communicate(b"\n")


@contextmanager
def a_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"port {server.getsockname()[1]} of process "


@contextmanager
def shared_memory() -> Iterator[str]:
    memory = SharedMemory(create=True, size=16)
    yield f"shared memory {memory.name}"
    memory.close()
    memory.unlink()


@pytest.mark.parametrize("leave", [a_thread, a_process, a_port, a_port_of_a_process, shared_memory])
def test_what_is_left_is_named_and_what_has_ended_is_not(leave) -> None:
    before = Footprint.take()
    with leave() as name:
        left = before.left(timeout_seconds=0)
        assert any(each.startswith(name[:60]) for each in left), left
    assert before.left() == []
