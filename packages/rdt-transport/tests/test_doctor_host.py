import subprocess
import sys
from pathlib import Path

import pytest

from rdt_transport.doctor.examination import Setting
from rdt_transport.doctor.host import host_facts, settings, versions

ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"  # read for every agent
LEVEL = "NIXL_LOG_LEVEL"  # read once a process
SIGNO = "UCX_DEBUG_SIGNO"  # so is this


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_what_the_kernel_says_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n")
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1\n")
    write(tmp_path, "proc/sys/kernel/random/boot_id", "abc\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write(tmp_path, "sys/class/infiniband/mlx5_1/node_type", "")
    write(tmp_path, "sys/class/infiniband/mlx5_0/node_type", "")
    write(tmp_path, "dev/infiniband/uverbs0", "")
    write(tmp_path, "dev/shm/x", "")
    facts = host_facts(tmp_path)

    assert (facts.boot_id, facts.can_ptrace, facts.ptrace_scope) == ("abc", True, 1)
    assert (facts.huge_pages, facts.rdma_devices) == ("never", ("mlx5_0", "mlx5_1"))
    assert facts.has_uverbs and facts.shm_bytes


@pytest.mark.parametrize("bits", ["0000000000000000", "000001fffff7ffff"])
def test_other_capabilities_are_not_that_of_tracing(tmp_path: Path, bits: str) -> None:
    write(tmp_path, "proc/self/status", f"CapEff:\t{bits}\n")

    assert host_facts(tmp_path).can_ptrace is False


def test_a_kernel_that_says_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)

    assert facts.can_ptrace is facts.ptrace_scope is facts.huge_pages is facts.shm_bytes is None
    assert not facts.rdma_devices and not facts.has_uverbs


@pytest.mark.parametrize(
    ("started", "prepared", "running", "was_loaded", "expected"),
    [
        ({}, {}, {ZCOPY: "y"}, False, ("y", "rdt")),
        ({}, {}, {ZCOPY: "y"}, True, ("y", "rdt")),
        ({}, {}, {LEVEL: "y"}, False, ("y", "rdt")),
        ({}, {}, {LEVEL: "y"}, True, ("y", "too late")),
        ({}, {}, {SIGNO: "0"}, False, ("0", "rdt")),
        ({}, {}, {SIGNO: "0"}, True, ("0", "too late")),
        ({LEVEL: "n"}, {LEVEL: "n"}, {LEVEL: "n"}, True, ("n", "user")),
        ({}, {}, {}, False, (None, "nobody")),
        ({ZCOPY: "n"}, {ZCOPY: "n"}, {ZCOPY: "n"}, False, ("n", "user")),
        ({ZCOPY: "n"}, {ZCOPY: "n"}, {ZCOPY: "n"}, True, ("n", "user")),
        ({}, {ZCOPY: "y"}, {ZCOPY: "y"}, False, ("y", "doctor")),
        ({ZCOPY: "n"}, {ZCOPY: "y"}, {ZCOPY: "y"}, False, ("y", "doctor")),
    ],
)
def test_who_set_a_variable(started, prepared, running, was_loaded, expected) -> None:
    found = settings(started, prepared, running, was_loaded)

    name = next(iter(running), ZCOPY)
    assert Setting(name, *expected) in found


def test_ucx_reads_what_decides_the_path_anew_for_every_agent() -> None:
    code = (
        "import os\n"
        "from rdt_transport.agent import NixlAgent\n"
        "from rdt_transport.errors import WireError\n"
        "os.environ['UCX_NET_DEVICES'] = 'lo'\n"
        "first = NixlAgent('first')\n"
        "os.environ['UCX_TLS'] = 'self'  # too little for an agent\n"
        "try:\n"
        "    NixlAgent('second')\n"
        "except WireError:\n"
        "    print('read again')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.endswith("read again\n")


def test_variables_of_others_are_left_out() -> None:
    names = [each.name for each in settings({}, {}, {"UCX_TLS": "tcp", "HOME": "/"}, False)]

    assert "UCX_TLS" in names and "HOME" not in names


def test_versions_are_those_of_what_is_installed() -> None:
    found = versions()

    assert found["nixl"].startswith("1.")
    assert "torch" in found and "rdt-transport" in found
