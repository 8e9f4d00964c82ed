import importlib.metadata
import os
import subprocess
import sys

import pytest

from rdt_transport import agent
from rdt_transport.agent import NixlAgent
from rdt_transport.errors import NixlMissingError, RdtTransportError, WireError


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_the_wires_imports_no_nixl_and_sets_no_environment():
    result = run_python(
        "import os; before = dict(os.environ)\n"
        "import rdt_transport.wire.nixl, rdt_transport.progress, sys\n"
        "assert dict(os.environ) == before\n"
        "assert not [name for name in sys.modules if name.startswith('nixl')]\n"
    )

    assert result.returncode == 0, result.stderr


def test_defaults_are_set_at_creation_unless_the_user_set_them():
    result = run_python(
        "import os\n"
        "os.environ['NIXL_LOG_LEVEL'] = 'ERROR'\n"
        "os.environ.pop('UCX_CUDA_IPC_ENABLE_GET_ZCOPY', None)\n"
        "from rdt_transport import agent\n"
        "agent._NVIDIA_DRIVER_PATHS = ['/']\n"
        "agent.NixlAgent('a').close()\n"
        "assert os.environ['NIXL_LOG_LEVEL'] == 'ERROR'\n"
        "assert os.environ['UCX_CUDA_IPC_ENABLE_GET_ZCOPY'] == 'y'\n"
    )

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("given", ["", "handler", "user"])
def test_a_process_with_an_agent_is_hung_up_as_without_one(given):
    """UCX would take the signal for its debug output, and keep it from the process."""
    result = run_python(
        "import os, signal, sys, time\n"
        "os.environ.setdefault('UCX_NET_DEVICES', 'lo')\n"
        "os.environ.pop('UCX_DEBUG_SIGNO', None)\n"
        f"given = {given!r}\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the one who tests ignores\n"
        "if given == 'handler':\n"
        "    signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(7))\n"
        "if given == 'user':\n"
        "    os.environ['UCX_DEBUG_SIGNO'] = 'SIGUSR2'\n"
        "from rdt_transport.agent import NixlAgent\n"
        "agent = NixlAgent('a')\n"
        "asked = signal.SIGUSR2 if given == 'user' else signal.SIGHUP\n"
        "os.kill(os.getpid(), asked)\n"
        "time.sleep(0.1)\n"
        "agent.close()\n"
        "sys.exit(9)\n"
    )

    assert result.returncode == {"": -1, "handler": 7, "user": 9}[given], result.stderr


def test_a_missing_nixl_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)

    with pytest.raises(NixlMissingError, match=r"pip install 'nixl>=1\.5,<2'") as caught:
        NixlAgent("a")
    assert isinstance(caught.value, RdtTransportError)
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_old_nixl_is_refused_with_its_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.2")

    with pytest.raises(NixlMissingError, match=r"1\.5 or newer, found 1\.4\.2"):
        NixlAgent("a")


def test_an_unknown_backend_is_refused_with_what_there_is():
    with pytest.raises(WireError, match=r"no plugin CARRIER_PIGEON, only .*UCX"):
        NixlAgent("a", backend="CARRIER_PIGEON")


def test_errors_of_nixl_become_ours_and_stay_the_cause():
    made = NixlAgent("a")
    try:
        with pytest.raises(WireError, match="a notifying nobody: nixl") as caught:
            made.notify("nobody", b"x")
        assert type(caught.value.__cause__).__module__.startswith("nixl")
    finally:
        made.close()


def test_the_minimum_version_is_the_one_the_package_requires():
    (requirement,) = (
        each for each in importlib.metadata.requires("rdt-transport") or [] if "nixl" in each
    )
    assert ">=" + ".".join(map(str, agent._MINIMUM_VERSION)) in requirement


def test_reads_into_a_gpu_are_posted_by_threads_where_there_are_cores(monkeypatch):
    for cores, expected in ((3, 0), (4, 4), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert agent.posting_threads("cuda") == expected
        assert agent.posting_threads("cpu") == 0


def test_threads_that_post_sleep_while_there_is_nothing_to_post():
    """Its own process: what this one's other threads do is not of interest."""
    result = run_python(
        "import os, time\n"
        "os.environ.setdefault('UCX_NET_DEVICES', 'lo')\n"
        "from rdt_transport.agent import NixlAgent\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "plain = NixlAgent('plain')\n"
        "before = count()\n"
        "agent = NixlAgent('a', num_threads=3)\n"
        "assert count() >= before + 3, (count(), before)\n"
        "used = time.process_time()\n"
        "time.sleep(1.0)\n"
        "used = time.process_time() - used\n"
        "assert used < 0.3, used\n"
        "agent.close()\n"
        "plain.close()\n"
    )

    assert result.returncode == 0, result.stderr
