"""What a process has open, before and after: whatever is new is left behind.

Child processes (Ray's and vLLM's among them), shared memory, our threads, and listening ports of
this process and of its children. A Ray actor is a process, so it needs no count of its own.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Footprint"]

SHARED_MEMORY = Path("/dev/shm")
OUR_THREADS = ("rdt-", "worker", "producer")
_MEMORY = "shared memory "
_SEMAPHORES = "sem.mp-"  # of ``multiprocessing``, whose tracker frees them when this process ends


@dataclass(frozen=True, slots=True)
class Footprint:
    """What is open: names that say what each thing is."""

    names: frozenset[str]

    @classmethod
    def take(cls) -> "Footprint":
        """Now, of this process and its children."""
        me = psutil.Process()
        names = {f"thread {t.name}" for t in threading.enumerate() if _is_ours(t.name)}
        names |= {_MEMORY + n for n in os.listdir(SHARED_MEMORY) if not n.startswith(_SEMAPHORES)}
        for process in [me, *me.children(recursive=True)]:
            try:
                command = " ".join(process.cmdline())
                if process != me and process.status() != psutil.STATUS_ZOMBIE:
                    # Python keeps its trackers of shared memory until this process ends.
                    if "resource_tracker" not in command:
                        names.add(f"process {process.pid}: {command:.80}")
                for each in process.net_connections(kind="inet"):
                    if each.status == psutil.CONN_LISTEN:
                        names.add(f"port {each.laddr.port} of process {process.pid}")
            except psutil.NoSuchProcess:
                continue
        return cls(frozenset(names))

    def left(self, timeout_seconds: float = 30.0) -> list[str]:
        """What is open now and was not then, in order; what is just ending is waited for."""
        deadline = time.monotonic() + timeout_seconds
        while (new := self._new()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return new

    def _new(self) -> list[str]:
        new = self.take().names - self.names
        if any(name.startswith(_MEMORY) for name in new):  # which others on this machine make too
            new -= {_MEMORY + name for name in _mapped_by_others()}
        return sorted(new)


def _is_ours(name: str) -> bool:
    return name.startswith(OUR_THREADS)


def _mapped_by_others() -> set[str]:
    """Shared memory that a process which is neither this one nor below it has mapped."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    found = set()
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            mapped = [each.path for each in process.memory_maps()]
        except psutil.Error:
            continue
        found |= {Path(path).name for path in mapped if path.startswith(f"{SHARED_MEMORY}/")}
    return found
