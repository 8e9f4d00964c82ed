"""The reference example: it runs as its reader would run it, and its proof notices one byte."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import reference_sync

EXAMPLE = Path(reference_sync.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_it_is_exact_and_says_so() -> None:
    ended = run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("exact; each worker pulled 6,720 of 12,864 bytes") == 2
    assert ended.stderr == ""


def test_one_flipped_byte_is_noticed() -> None:
    ended = run("--flip")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "NOT exact: worker 1: byte 197 of layers.1.qkv" in ended.stdout
    assert "\nexact" not in ended.stdout


@pytest.mark.parametrize("lost", ["layers.0.q", "layers.1.norm", "embed"])
def test_a_weight_that_changes_while_it_is_served_is_noticed(lost: str) -> None:
    """The proof looks at what landed, not at what was sent."""
    manifest = reference_sync.describe(reference_sync.checkpoint(0))
    plans = [reference_sync.plan_for(worker, manifest) for worker in range(2)]
    job = reference_sync.Job(manifest, plans)
    weights = reference_sync.checkpoint(1)
    changed = weights[lost].clone()
    changed.view(torch.uint8)[..., 0] ^= 1
    job.sync(weights | {lost: changed})
    name = lost.replace(".q", ".qkv")
    for consumer in job.consumers:
        found = reference_sync.difference(consumer.model, weights)
        assert found == f"worker {consumer.worker}: byte 0 of {name}"
    job.sync(weights)
    assert [reference_sync.difference(each.model, weights) for each in job.consumers] == [None] * 2


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 300
