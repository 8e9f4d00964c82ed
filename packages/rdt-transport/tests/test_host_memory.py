from pathlib import Path

import pytest

from rdt_transport.host_memory import free_host_bytes


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemAvailable:  100 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup(path: str, limit: str, usage: int, cached: int) -> dict[str, str]:
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{usage}\n",
        f"{path}/memory.stat": f"anon 7\ninactive_file {cached}\n",
    }


def test_without_cgroups_it_is_what_the_kernel_has(tmp_path):
    assert free_host_bytes(host(tmp_path, {})) == 100 << 10


@pytest.mark.parametrize(
    ("limit", "usage", "cached", "expected"),
    [
        ("max", 5000, 0, 100 << 10),
        ("9000", 5000, 0, 4000),
        ("9000", 5000, 600, 4600),  # page cache is given back
        ("9000", 9500, 0, 0),
        (str(1 << 40), 5000, 0, 100 << 10),
    ],
)
def test_a_cgroup_has_what_is_left_of_its_limit(tmp_path, limit, usage, cached, expected):
    own = cgroup("sys/fs/cgroup/job", limit, usage, cached)
    root = host(tmp_path, {"proc/self/cgroup": "0::/job\n", **own})

    assert free_host_bytes(root) == expected


def test_the_tightest_cgroup_above_counts(tmp_path):
    groups = cgroup("sys/fs/cgroup/a/b", "max", 10, 0) | cgroup("sys/fs/cgroup/a", "300", 100, 0)
    root = host(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **groups})

    assert free_host_bytes(root) == 200


def test_a_cgroup_of_version_1(tmp_path):
    folder = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "8:pids:/\n4:memory:/job\n",
        f"{folder}/memory.limit_in_bytes": "900",
        f"{folder}/memory.usage_in_bytes": "500",
        f"{folder}/memory.stat": "inactive_file 50\n",
    }

    assert free_host_bytes(host(tmp_path, files)) == 450


def test_a_kernel_that_does_not_say(tmp_path):
    assert free_host_bytes(tmp_path) is None


def test_this_host_says():
    free = free_host_bytes()
    assert free is not None and free > 0
