"""The benchmark of a whole sync: it compares what arrived, and ends in its JSON line."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import rows, run, verdict
from bench.parallel_model import NUM_WORKERS, Model

ROOT = Path(__file__).parents[1]
MEGABYTES = 8


def writes_applied(model: Model, worker: int) -> dict[tuple[str, str], torch.Tensor]:
    parameters = model.parameters()
    sources = dict(model.weights())
    for place in model.writes(worker):
        region = place.slice
        source = sources[region.name].as_strided(region.shape, region.stride, region.offset)
        target = parameters[place.module, place.param]
        target.as_strided(place.shape, place.stride, place.offset).copy_(
            source.reshape(place.shape)
        )
    return parameters


def test_a_small_sync() -> None:
    command = [sys.executable, "-m", "bench.bench_sync", "--megabytes", str(MEGABYTES)]
    process = subprocess.run(
        [*command, "--rounds", "1", "--chunk-megabytes", "0.25", "--slots", "3"],
        env={"UCX_NET_DEVICES": "lo", **os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert process.returncode == 0, process.stdout + process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found.keys() >= {"bench", "ratio", "control_microseconds_per_chunk", "transport"}
    assert found["bench"] == "sync"
    assert 0 <= found["messages_beyond_two_a_chunk"] <= 4
    assert found["ratio"] > 0 and found["control_microseconds_per_chunk"] > 0
    model = Model.of(MEGABYTES * 10**6)
    num_bytes = NUM_WORKERS * sum(p.numel() * p.itemsize for p in model.parameters().values())
    assert f"{num_bytes:,} bytes, all equal" in process.stdout


@pytest.mark.parametrize("worker", range(NUM_WORKERS))
def test_the_comparison_covers_every_element_and_sees_a_flipped_bit(worker: int) -> None:
    model = Model(hidden=16, intermediate=24, kv=8, num_layers=2)
    parameters = writes_applied(model, worker)
    num_elements = sum(tensor.numel() for tensor in parameters.values())

    assert model.num_wrong(worker, parameters) == (0, num_elements)
    for tensor in parameters.values():
        tensor.view(torch.int16).view(-1)[-1] ^= 1
    assert model.num_wrong(worker, parameters) == (len(parameters), num_elements)


def test_the_workers_halves_are_the_whole_model() -> None:
    model = Model(hidden=16, intermediate=24, kv=8, num_layers=2)
    pulled = sum(p.slice.num_bytes for w in range(NUM_WORKERS) for p in model.writes(w))
    norms = sum(param.num_bytes for param in model.manifest().params if len(param.shape) == 1)

    assert pulled == model.num_bytes + norms  # the norms twice


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"ratio": 1.3, "transport": "cma"}, "met"),
        ({"ratio": 1.31, "transport": "cma"}, "missed"),
        ({"ratio": 1.0, "transport": "tcp (not comparable)"}, "not comparable"),
    ],
)
def test_a_target_is_met_up_to_it(found: dict[str, object], expected: str) -> None:
    assert verdict("sync", "ratio", found) == ("at most 1.3", expected)
    assert verdict("wire", "ratio", found) == ("", "")


@pytest.mark.parametrize(("attached", "expected"), [(0.03, "met"), (0.031, "missed")])
def test_an_idle_worker_is_held_to_what_it_costs_unattached(attached: float, expected: str) -> None:
    found = {"idle_cores_attached": attached, "idle_cores_unattached": 0.02}

    assert verdict("idle", "idle_cores_attached", found) == ("at most 0.03", expected)


def test_a_benchmark_that_fails_is_a_row_and_no_exception() -> None:
    assert run("that_is_not_there") == "failed with exit status 1"


@pytest.mark.parametrize(
    ("bound", "target"), [(4.0, "at least 2.2"), (2.0, "at least 1.8"), (1.74, "at least 1.57")]
)
def test_a_recording_is_held_to_nine_tenths_of_what_its_loaders_allow(
    bound: float, target: str
) -> None:
    found = {"bench": "bake", "models": {"m:tp8r0": {"bake_ratio": 1.6, "bound_ratio": bound}}}

    assert list(rows("bake", found)) == [
        ("m:tp8r0 bake_ratio", "1.6", target, "met" if bound < 1.75 else "missed"),
        ("m:tp8r0 bound_ratio", f"{bound:.3g}", "", ""),
    ]


def test_a_child_dies_with_the_process_that_forked_it() -> None:
    program = (
        "import os, time\n"
        "from bench.child import follow_parent\n"
        "parent = os.getpid()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    follow_parent(parent)\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)  # it is there
    parent.kill()
    parent.wait()

    ended, _, _ = select.select([parent.stdout], [], [], 20)  # once nobody can write to it
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert ended
    assert parent.stdout.read() == b""
