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
    """It refuses to compare unless both recordings cover the model with the same bytes."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bench_bake.py"), "--layers", "2", "--pairs", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("bench") == "bake"
    assert found.keys() == {"bake_ratio", "plan_ratio", "peak_memory_ratio"}
    assert all(value > 0 for value in found.values())
    assert "789 names" in run.stdout
