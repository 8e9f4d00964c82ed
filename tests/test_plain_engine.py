"""The example of another engine: two processes over NIXL, exact, and its proof notices one byte."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples import plain_engine
from rdt_bake import record
from rdt_plan import ParamMeta

pytestmark = pytest.mark.timeout(300)

EXAMPLE = Path(plain_engine.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_both_syncs_are_exact_and_need_a_program() -> None:
    ended = run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["sync 1: exact", "sync 2: exact"]
    assert ended.stdout.count("program of layers.") == plain_engine.NUM_LAYERS
    assert "Error" not in ended.stderr


def test_one_flipped_byte_is_noticed() -> None:
    ended = run("--flip")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "sync 2: NOT exact: layers.1.decay" in ended.stderr
    assert "sync 2: exact" not in ended.stdout


def test_its_loader_computes_in_every_layer() -> None:
    model = plain_engine.Model()
    params = [
        ParamMeta(n, "float32", tuple(t.shape)) for n, t in plain_engine.weights_of(0).items()
    ]
    programs = record(model, model.load, params).programs
    operations = {statement.op for program in programs for statement in program.statements}
    assert len(programs) == plain_engine.NUM_LAYERS
    assert {"aten.mul.Tensor", "aten.exp.default", "aten.neg.default"} <= operations


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 200
