"""The benchmark of recording runs, checks what it compares, and ends in its JSON line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.engine
def test_a_few_layers() -> None:
    """It refuses to compare unless both recordings cover the model with the same bytes.

    Three dense layers and one with experts, of which this rank has an eighth.
    """
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "bench" / "bench_bake.py"), "--layers", "4"),
            *("--pairs", "1", "--models", "deepseek-v3", "--modes", "ep8r0"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["bench"] == "bake"
    assert found["models"].keys() == {"deepseek-v3:ep8r0"}
    (ratios,) = found["models"].values()
    assert list(ratios) == [
        *("bake_ratio", "bound_ratio", "seen_ratio", "plan_ratio", "peak_memory_ratio")
    ]
    assert all(value > 0 for value in ratios.values())
    assert "821" in run.stdout
