"""A probe's process ends with its ``with``, whatever it was doing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdt_transport.doctor import probe_process
from rdt_transport.doctor.probe_process import ProbeProcess
from rdt_transport.errors import WireError, WireTimeoutError


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[ProbeProcess]:
    with ProbeProcess("cpu", tmp_path, is_loopback=True, timeout_seconds=60.0) as probe:
        yield probe
    assert not probe.is_alive


def test_a_probe_that_dies_is_named_and_not_asked_again(probe: ProbeProcess) -> None:
    pid = probe.ask("source").pid
    os.kill(pid, signal.SIGKILL)

    for _ in range(2):
        with pytest.raises(WireError, match="cpu: its process"):
            probe.ask("settings")


def test_a_probe_that_hangs_is_given_up_at_its_deadline_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProbeProcess("cpu", tmp_path, is_loopback=True, timeout_seconds=60.0) as probe:
        os.kill(probe.ask("source").pid, signal.SIGSTOP)
        monkeypatch.setattr(probe, "_timeout_seconds", 0.1)
        monkeypatch.setattr(probe_process, "_END_SECONDS", 0.5)

        with pytest.raises(WireTimeoutError, match=r"cpu: settings took more than 0\.1 s"):
            probe.ask("settings")
        with pytest.raises(WireError, match=r"cpu: settings took more than 0\.1 s"):
            probe.ask("idle_cores")
    assert not probe.is_alive


def test_what_a_probe_fails_at_is_told_and_it_goes_on(probe: ProbeProcess) -> None:
    with pytest.raises(WireError, match="cpu: free_bytes: "):
        probe.ask("free_bytes")  # of a GPU
    assert probe.ask("ucx_version")
