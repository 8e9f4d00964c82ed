"""The command as a user runs it, in processes of its own, on CPU.

Each start imports torch three times, so what one can show is asserted on one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rdt_transport.doctor.command import main

COMMAND = [sys.executable, "-m", "rdt_transport.doctor"]
SECONDS = 150
HAS_GPU = os.path.exists("/dev/nvidiactl")


def environment(**changes: str) -> dict[str, str]:
    """Ours, without UCX's and NIXL's variables and GPUs, unless ``changes`` bring some."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": "", **changes}


def examined(*arguments: str, **changes: str) -> tuple[int, dict[str, Any]]:
    command = [*COMMAND, "--json", *arguments]
    done = subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def setting(found: dict[str, Any], name: str) -> tuple[str, str]:
    (each,) = (each for each in found["settings"] if each["name"] == name)
    return each["value"], each["origin"]


@dataclass(frozen=True)
class Visit:
    """What a doctor found that was sent to another one at ``peer``."""

    peer: str
    status: int
    found: dict[str, Any]


@pytest.fixture(scope="module")
def visited() -> Visit:
    """One doctor serves, until the other one, which looks at everything, has gone."""
    server = subprocess.Popen(
        [*COMMAND, "--serve", "--timeout", "60"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(SECONDS, server.kill)
    killer.start()
    try:
        assert server.stdout is not None
        announced = re.search(r"--peer (127\.0\.0\.1:\d+)", server.stdout.readline())
        assert announced
        status, found = examined("--ring-bytes", "4096", "--peer", announced[1])
        assert server.wait(30) == 0
    finally:
        killer.cancel()
        server.kill()
        server.wait(30)
    return Visit(announced[1], status, found)


def has_probe(group: int) -> bool:
    """Whether a process of that group has been spawned to probe with."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if os.getpgid(int(command.parent.name)) == group:
                if b"spawn_main" in command.read_bytes():
                    return True
    return False


@pytest.mark.parametrize("arguments", [["--serve"], []])
def test_ctrl_c_ends_every_process_without_a_traceback(arguments: list[str]) -> None:
    """As a terminal sends it: to all processes of the group."""
    doctor = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if arguments:
            assert doctor.stdout is not None
            assert doctor.stdout.readline().startswith("serving")
        else:
            while not has_probe(doctor.pid):
                assert doctor.poll() is None
                time.sleep(0.01)
        os.killpg(doctor.pid, signal.SIGINT)
        _, errors = doctor.communicate(timeout=60)  # they hold its pipes until they end
    finally:
        doctor.kill()
        doctor.wait(30)
    assert doctor.returncode == 130
    assert errors == "rdt-doctor: interrupted\n"


def test_a_machine_is_examined(visited: Visit) -> None:
    status, found = visited.status, visited.found

    assert found["schema"] == 1 and found["exit_status"] == status
    pair, _ = found["pairs"]
    assert (pair["reader"], pair["source"], pair["error"]) == ("cpu", "cpu", None)
    reads = pair["reads"]
    assert reads["is_equal"] is True
    assert reads["small_seconds"] > 0 and reads["ratio"] > 0
    refused = pair["copy_refusal"] is not None  # by the kernel, asked without UCX
    assert reads["transport"] == ("tcp" if refused else "cma")
    assert status == (1 if refused else 0)
    assert found["versions"]["ucx"] and found["versions"]["nixl"]
    assert 0 < found["idle_cores"] < 1
    (memory,) = found["memory"]
    assert memory["device"] == "cpu" and memory["free_bytes"] > 4096
    assert setting(found, "NIXL_LOG_LEVEL") == ("WARN", "rdt")
    assert setting(found, "UCX_PROTO_INFO") == ("y", "doctor")


def test_two_doctors_read_from_one_another(visited: Visit) -> None:
    here, there = visited.found["pairs"]

    assert there["peer"] == visited.peer and there["reads"]["is_equal"] is True
    assert there["reads"]["transport"] == here["reads"]["transport"]
    assert visited.found["peer_host"]["boot_id"] == visited.found["host"]["boot_id"]


def test_a_users_ucx_tls_that_leaves_tcp_is_the_named_cause_and_status_1() -> None:
    tls = "tcp,cuda_copy" if HAS_GPU else "tcp"  # NIXL refuses less where there is a GPU
    status, found = examined(UCX_TLS=tls)

    assert status == found["exit_status"] == 1
    (pair,) = found["pairs"]
    assert pair["slow"] and pair["reads"]["transport"] == "tcp" and pair["reads"]["is_emulated"]
    assert pair["reads"]["is_equal"] is True
    assert setting(found, "UCX_TLS") == (tls, "user")
    (slow,) = (each for each in found["findings"] if each["severity"] == "slow")
    assert slow["name"] == "cpu <- cpu"
    assert f"UCX_TLS is {tls}" in slow["why"] and "unset UCX_TLS" in slow["remedy"]


@pytest.mark.gpu
@pytest.mark.parametrize(("get_zcopy", "transport"), [("y", "cuda_ipc"), ("n", "tcp")])
def test_two_processes_on_one_gpu(get_zcopy: str, transport: str) -> None:
    changes = {"CUDA_VISIBLE_DEVICES": "0", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": get_zcopy}
    status, found = examined(**changes)

    _, pair = found["pairs"]
    assert (pair["reader"], pair["source"]) == ("cuda:0", "cuda:0")
    assert pair["reads"]["is_equal"] is True and pair["reads"]["transport"] == transport
    assert status == (1 if transport == "tcp" else 0)
    causes = [each["why"] for each in found["findings"] if each["severity"] == "slow"]
    assert all("UCX_CUDA_IPC_ENABLE_GET_ZCOPY is n" in why for why in causes)
    assert [each["device"] for each in found["memory"]] == ["cpu", "cuda:0"]


def test_an_agent_that_cannot_come_up_is_status_2() -> None:
    status, found = examined(UCX_TLS="self")

    assert status == 2 and found["agent_error"] and found["pairs"] == []
    (agent,) = (each for each in found["findings"] if each["name"] == "agent")
    assert "UCX_TLS is self" in agent["why"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peer", "nowhere"],
        ["--ring-bytes", "0"],
        ["--timeout", "nan"],
        ["--serve", "--peer", "a:1"],
    ],
)
def test_a_wrong_argument_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)

    out, errors = capsys.readouterr()
    assert errors and not out


@pytest.mark.parametrize(
    "arguments", [["--peer", "127.0.0.1:1", "--timeout", "5"], ["--serve", "--timeout", "0.001"]]
)
def test_what_cannot_be_done_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2  # and nothing was raised

    out, errors = capsys.readouterr()
    assert errors.startswith("rdt-doctor: ")
    assert not out or out.startswith("serving")
