"""How much more memory this process may take on its host: what the kernel has, or its cgroup."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_host_bytes"]

_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""The limit and the usage of a cgroup, by the controllers its line names: version 2, version 1."""


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated and touched; None where the kernel does not say.

    Page cache counts as free. ``root`` is where ``proc`` and ``sys`` are mounted.
    """
    try:
        fields = dict(_fields(root / "proc/meminfo"))
        found = [int(fields["MemAvailable"].removesuffix(" kB")) << 10]
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min([*found, *_cgroup_free(root)]))


def _cgroup_free(root: Path) -> Iterator[int]:
    """What is left of the limit of every cgroup this process is in, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in _FILES:
            continue
        limit, usage = _FILES[controllers]
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")
        while group.is_relative_to(mount):
            try:
                cached = dict(_fields(group / "memory.stat", " ")).get("inactive_file", "0")
                left = int((group / limit).read_text()) - int((group / usage).read_text())
                yield left + int(cached)
            except (OSError, ValueError):  # no such file, or "max"
                pass
            group = group.parent


def _fields(path: Path, separator: str = ":") -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(separator)
        yield name, value.strip()
