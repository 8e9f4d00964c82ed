"""The benchmark of sharded sources: what it measures is there, and what it says is so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import verdict

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)
def test_a_small_run() -> None:
    command = [sys.executable, "-m", "bench.bench_sources", "--layers", "3", "--tensors", "4"]
    process = subprocess.run(
        [*command, "--megabytes", "1", "--chunk-megabytes", "1", "--syncs", "1"],
        env={"UCX_NET_DEVICES": "lo", **os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )

    assert process.returncode == 0, process.stdout + process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert list(found) == [
        "bench",
        "gather_groups",
        "groups_allowed",
        "shards_chunks",
        "shards_direct_total_chunks",
        "shards_total_chunks",
        "shards_grow_chunks",
        "masters_total_chunks",
        "bytes_ratio",
    ]
    assert found["bytes_ratio"] == 1.0  # no padding, as each piece is a multiple of 16 bytes
    assert found["groups_allowed"] == 2.5
    assert found["gather_groups"] > 0.5  # a layer is gathered whole, beside all else
    # The slots are in the one, and there are none in the other.
    assert found["shards_total_chunks"] > found["shards_direct_total_chunks"] + 1.5
    assert "shards, fp32 masters, through slots" in process.stdout
    assert "shards, fp32 masters cast one by one" in process.stdout


@pytest.mark.parametrize(
    ("measure", "most"),
    [
        ("gather_groups", 2.167),
        ("shards_chunks", 2.0),
        ("shards_direct_total_chunks", 2.0),
        ("shards_total_chunks", 2.0),
        ("shards_grow_chunks", 2.05),
        ("masters_total_chunks", 2.0),
        ("bytes_ratio", 1.02),
    ],
)
def test_targets(measure: str, most: float) -> None:
    for value, expected in ((most, "met"), (most + 0.01, "missed")):
        found = {measure: value, "groups_allowed": 2.167}
        assert verdict("sources", measure, found)[1] == expected
