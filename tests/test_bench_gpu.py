"""The GPU benchmark, tried out on a CPU: its rows, its FSDP2 trainer, and whole runs of it."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.gpu.__main__ import _failed, main
from bench.gpu.devices import Devices, placed
from bench.gpu.fsdp_trainer import FsdpTrainer
from bench.gpu.measured import Result
from bench.gpu.models import MODELS, fill
from bench.gpu.tables import tables
from bench.gpu.ways import SOURCES, VARIANTS, ways
from bench.gpu.worker import GpuWorker
from rdt_trainer import JobSettings
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.testing.object_process import ObjectProcess
from rdt_transport.wire.nixl import NixlWire

ROOT = Path(__file__).parents[1]
some = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)


@given(
    variants=st.lists(st.sampled_from(list(VARIANTS)), min_size=1, unique=True),
    slots=some,
    caps=some,
    threads=st.just([]) | some,
    sources=st.lists(st.sampled_from(list(SOURCES)), unique=True),
)
def test_every_combination_is_one_row_and_has_a_name_of_its_own(
    variants: list[str],
    slots: list[int],
    caps: list[int],
    threads: list[int],
    sources: list[str],
) -> None:
    found = ways(variants, slots, caps, threads, sources)

    assert len({way.name for way in found}) == len(found)
    for variant, source in product(variants, sources or ["gathered"]):
        own = VARIANTS[variant]
        rows = [way for way in found if (way.variant, way.source) == (variant, source)]
        posting = [own["read_threads"]] if "read_threads" in own else threads or [None]
        assert [way.is_first for way in rows] == [True] + [False] * (len(rows) - 1)
        assert [
            (way.num_slots, way.max_chunk_mib, way.options.get("read_threads")) for way in rows
        ] == list(product(slots, caps, posting))
        assert all(own.items() <= way.options.items() for way in rows)


def test_rows_name_what_they_differ_by() -> None:
    assert [way.name for way in ways(["rdt"], [2], [1280])] == ["rdt"]
    assert [way.name for way in ways(["rdt staged"], [3], [320, 640], [4])] == [
        "rdt staged, 3 slots of 320 MiB",
        "rdt staged, 3 slots of 640 MiB",
    ]
    assert [way.name for way in ways(["rdt"], [2], [64], [0, 4], ["shards"])] == [
        "rdt, shards, 0 reading threads",
        "rdt, shards, 4 reading threads",
    ]
    with pytest.raises(ValueError, match="'rtd' is unknown: expected one of"):
        ways(["rtd"], [2], [1280])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("cuda", 1, 1, 1), Devices(("cuda",), ("cuda",))),
        (("cuda", 2, 1, 1), Devices(("cuda:0",), ("cuda:1",))),
        (("cuda", 1, 1, 2), Devices(("cuda:0",), ("cuda:0", "cuda:1"))),
        (("cuda", 2, 2, 1), Devices(("cuda:0", "cuda:1"), ("cuda:1",))),
        (("cpu", 2, 2, 1), Devices(("cpu", "cpu"), ("cpu",))),
    ],
)
def test_each_rank_has_a_device_of_its_own(given: tuple[Any, ...], expected: Devices) -> None:
    assert placed(*given) == expected


def test_a_path_that_failed_is_a_row_among_the_others() -> None:
    results = {
        "rdt": Result([9.0, 0.01, 0.02, 0.03], (0, 7), target=4.0),
        "rdt staged": Result([9.0], error="[/bad] it broke"),
        "rdt wrong": Result([9.0, 0.01], (2, 7), target=4.0),
        "vllm sharded_rdt": Result([9.0, 0.1], (1, 7)),
    }
    console = Console(width=140, file=io.StringIO(), markup=False)
    for table in tables("dense", 10**9, {"device copy": 0.001}, results):
        console.print(table)
    printed: Any = console.file
    rows = [line.split("│")[1:-1] for line in printed.getvalue().splitlines() if "│" in line]

    assert [[cell.strip() for cell in row] for row in rows] == [
        ["device copy", "", "1.00", "1000", "", "", ""],
        ["rdt", "9000.0", "20.00", "50", "5.0", "4 met", "0 of 7"],
        ["rdt staged", "", "failed", "", "", "", ""],
        ["rdt wrong", "9000.0", "10.00", "100", "10.0", "4 void", "2 of 7"],
        ["vllm sharded_rdt", "9000.0", "100.00", "10", "1.0", "", "1 of 7"],
    ]


class EngineTrainer(FsdpTrainer):
    """Before plain tensors behind real consumers, in the process of rank 0."""

    def use_engine(self, source: str) -> None:
        self.engine = TorchEngineClient(lambda role: NixlWire(role), timeout_seconds=100.0)
        settings = JobSettings(self._num_ranks, max_chunk_bytes=1 << 18)
        self.attach(self.engine, settings, source)

    def received(self, version: int) -> tuple[list[str], tuple[int, int]]:
        """Names that are not what that version says, and the bytes read directly and staged."""
        (found,) = self.engine.workers
        assert found.keys() == self._weights.keys()
        wrong = [
            name
            for name, tensor in found.items()
            if not torch.equal(
                fill(torch.empty_like(tensor), name, version).view(torch.int16),
                tensor.view(torch.int16),
            )
        ]
        return wrong, self.engine.bytes_pulled()

    def shapes(self) -> set[tuple[int, ...]]:
        return {tuple(sharded.to_local().shape) for sharded in self._weights.values()}


@contextmanager
def made(*arguments: Any) -> Generator[EngineTrainer]:
    torch.set_num_threads(1)  # they share few cores
    trainer = EngineTrainer(*arguments)
    yield trainer
    trainer.end()


def asked(ranks: list[ObjectProcess], method: str, *arguments: object) -> list[Any]:
    for rank in ranks:
        rank.tell(method, *arguments)
    return [rank.answer() for rank in ranks]


@pytest.mark.timeout(300)
def test_two_ranks_send_their_shards_of_each_version(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                ObjectProcess(made, "dense", True, "cpu", rank, 2, str(tmp_path / "meeting"))
            )
            for rank in range(2)
        ]
        model = MODELS["dense"].tiny()
        halves = {(shape[0] // 2, *shape[1:]) for shape in model.shapes().values()}
        assert asked(ranks, "shapes") == [halves, halves]
        (num_bytes, _) = asked(ranks, "num_bytes")

        for source, expected in (("shards", (num_bytes, 0)), ("gathered", (0, num_bytes))):
            asked(ranks, "use_engine", source)
            for version in (1, 2):
                asked(ranks, "set_version", version)
                for began, ended in asked(ranks, "sync"):
                    assert began < ended
                assert ranks[0].ask("received", version) == ([], expected)
            every = sorted(model.shapes())
            assert sorted(ranks[0].ask("received", 1)[0]) == every  # of another version
        assert [rank.stop() for rank in ranks] == [0, 0]


def last_line(*options: str, status: int = 0) -> dict[str, Any]:
    """What a run on the CPU ends with; its exit status is checked."""
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny", "--threads", ""]
    ended = subprocess.run(
        [*command, "--syncs", "1", *options],
        env={"UCX_NET_DEVICES": "lo", **os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["bench"] == "gpu"
    return found


def test_a_kind_that_is_unknown_is_no_success() -> None:
    with pytest.raises(typer.BadParameter, match="no kind 'moee': expected some of dense, moe"):
        main(kinds="dense,moee", device="cpu")


@pytest.mark.parametrize(
    ("result", "on_cpu", "on_gpu"),
    [
        (Result([9.0, 0.1], (0, 7)), [], []),
        (Result([9.0, 0.1], (1, 7)), [], ["rdt"]),  # a CPU packs parameters
        (Result([9.0], error="it broke"), ["rdt"], ["rdt"]),
        (Result([9.0, 0.1], (0, 7), error="no trace"), ["rdt"], ["rdt"]),
    ],
)
def test_what_failed_decides_the_exit_status(
    result: Result, on_cpu: list[str], on_gpu: list[str]
) -> None:
    bench: Any = SimpleNamespace(results={"rdt": result})
    assert (_failed(bench, "cpu"), _failed(bench, "cuda")) == (on_cpu, on_gpu)


class DeafWorker(GpuWorker):
    """Whose loaders write nothing."""

    def deafen(self) -> None:
        model: Any = self._model
        model.load_weights = lambda weights: set()


@contextmanager
def worker_made(kind: type[DeafWorker]) -> Generator[DeafWorker]:
    yield kind("dense", True, "cpu")


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_comparison_with_weights_that_were_not_loaded_fails() -> None:
    with ObjectProcess(worker_made, DeafWorker) as worker:
        worker.ask("deafen")
        wrong, compared = worker.ask("num_wrong", 1)
        assert wrong == compared > 0
        assert worker.stop() == 0


@pytest.mark.engine
@pytest.mark.timeout(500)
def test_a_sweep_is_a_row_for_each_combination() -> None:
    found = last_line(
        *("--kinds", "rank", "--variants", "rdt staged"),
        *("--slots", "2,3", "--max-chunk-mib", "1,2"),
    )["rank"]

    rows = {name: row for name, row in found.items() if name.startswith("rdt")}
    assert list(rows) == [
        f"rdt staged, {slots} slots of {mib} MiB" for slots, mib in product((2, 3), (1, 2))
    ]
    sources = len(MODELS["rank"].shapes())
    assert [(row["wrong"], row["error"]) for row in rows.values()] == [([0, sources], "")] * 4
    assert [bool(row["trace"]) for row in rows.values()] == [True, False, False, False]
    chunks = [row["plan"]["chunks"] for row in rows.values()]
    assert chunks[0] == chunks[2] > chunks[1] == chunks[3]  # of half the size


@pytest.mark.engine
@pytest.mark.timeout(500)
def test_two_trainers_are_rows_for_each_source_whichever_fails() -> None:
    found = last_line(
        *("--kinds", "dense,rank", "--variants", "rdt", "--max-chunk-mib", "1"),
        *("--trainers", "2", "--gpus", "2", "--peers", "sharded_rdt", "--read-threads=-1,0"),
        status=1,
    )

    assert found.keys() == {"bench", "dense"}
    rows = {name: row for name, row in found["dense"].items() if name.startswith(("rdt", "vllm"))}
    names = {source: f"rdt, {source}, 0 reading threads" for source in ("shards", "gathered")}
    assert rows.keys() == {*names.values(), *(name.replace("0", "-1") for name in names.values())}
    for name, row in rows.items():
        if name not in names.values():  # refused by the worker
            assert "read_threads must not be negative" in row["error"] and not row["seconds"]
            continue
        wrong, compared = row["wrong"]
        assert row["error"] == "" and len(row["seconds"]) == 2
        # at most the linear ones, which a CPU packs
        assert wrong <= 4 * MODELS["dense"].num_layers < compared
    assert rows[names["shards"]]["plan"]["direct_bytes"] > 0
    assert rows[names["gathered"]]["plan"]["direct_bytes"] == 0
