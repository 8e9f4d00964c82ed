"""A push that is interrupted while torch is imported, which takes seconds."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
MODULE, _, NAME = PROJECT["project"]["scripts"]["rdt-push"].partition(":")
SCRIPT = ["-c", f"import sys; from {MODULE} import {NAME}; sys.exit({NAME}())"]
BEGUN = "torch is being imported\n"


@pytest.fixture
def slow_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which torch takes its time."""
    (tmp_path / "torch.py").write_text(
        f"print({BEGUN!r}, end='', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("words", [SCRIPT, ["-m", "rdt_trainer.push"]])
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "hung up"),
    ],
)
def test_what_comes_while_torch_is_imported_ends_it_in_words(
    slow_torch: dict[str, str], words: list[str], number: int, told: str
) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, *words, "checkpoint", "--url", "http://127.0.0.1:9", "--json"]

    def heed() -> None:  # whatever the one who runs the tests ignores
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=slow_torch, preexec_fn=heed
    ) as pushing:
        assert pushing.stdout is not None
        assert pushing.stdout.readline() == BEGUN
        pushing.send_signal(number)
        out, errors = pushing.communicate(timeout=60)
    assert pushing.returncode == 128 + number
    assert errors == f"rdt-push: {told}; nothing was changed\n"
    said = json.loads(out)
    assert said == {"error": f"{told}; nothing was changed", "exit_status": 128 + number}


def test_the_package_offers_what_it_says_once_it_is_asked() -> None:
    code = (
        "import sys, rdt_trainer, rdt_trainer.push\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'RdtTrainer', 'HttpClient'} <= set(dir(rdt_trainer))\n"
        "assert rdt_trainer.RdtTrainer.__name__ == 'RdtTrainer'\n"
        "assert not hasattr(rdt_trainer, 'nothing') and not hasattr(rdt_trainer.push, 'nothing')\n"
        "from rdt_trainer import *\n"
        "assert HttpClient is rdt_trainer.HttpClient\n"
        "for package in (rdt_trainer, rdt_trainer.push):\n"
        "    assert all(getattr(package, name) for name in package.__all__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
