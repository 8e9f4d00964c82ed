"""One table: what a whole weight sync takes on one GPU, ours beside vLLM's and the hardware's.

Everything is measured in one run on the same bytes: a trainer and a worker in processes of their
own, on one GPU, driven over Ray by both sides' own clients. Each sync carries new weights and is
timed from its first call to its last; the first is shown apart, the others as their median. After
the last one the worker's parameters are compared, bit for bit, with what vLLM's own loader writes.
On a CPU, whose kernels pack parameters and leave them empty, those count as different.

The last line is one JSON object.
"""

import json
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.gpu.devices import is_gpu
from bench.gpu.limits import RawReads, raw_reads
from bench.gpu.models import MODELS
from bench.gpu.rank_worker import RankWorker
from bench.gpu.recorded import numbered, on_their_way
from bench.gpu.trainer import GpuTrainer
from bench.gpu.worker import GpuWorker
from bench.stages import STAGES, UNATTRIBUTED, Trace, blame, busy

CALL_SECONDS = 180.0
NAMESPACE = "rdt-bench"
VARIANTS: dict[str, dict[str, Any]] = {
    "rdt": {},
    "rdt unthreaded": {"read_threads": 0},
    "rdt staged": {"direct": False, "live": False},
}
TARGETS = {("dense", "rdt"): 12.0, ("moe", "rdt"): 8.0, ("dense", "rdt staged"): 4.0}
TARGETS["moe", "rdt staged"] = 4.0


@dataclass
class Result:
    """One way to sync one model."""

    seconds: list[float] = field(default_factory=list)
    wrong: tuple[int, int] | None = None
    init_seconds: float = 0.0
    plan: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    blame: dict[str, float] = field(default_factory=dict)
    trace: list[tuple[str, int, float, float]] = field(default_factory=list)  # ms from its start
    error: str = ""

    @property
    def median(self) -> float:
        """Of the warm syncs."""
        return statistics.median(self.seconds[1:])


class Bench:
    """The actors of one model, and what was measured with them."""

    def __init__(
        self, kind: str, tiny: bool, devices: tuple[str, ...], syncs: int, meeting: str
    ) -> None:
        """``devices``: the trainer's, and each worker's."""
        import ray

        self.kind, self.results = kind, dict[str, Result]()
        self._ray, self._syncs, self._version = ray, syncs, 0
        share = {"num_gpus": 0.1 if is_gpu(devices[0]) else 0, "num_cpus": 1}
        kind_of_worker: Any = RankWorker if kind == "rank" else GpuWorker
        worker = ray.remote(kind_of_worker).options(enable_tensor_transport=True, **share)
        trainer: Any = ray.remote(GpuTrainer).options(**share)
        own, *others = devices
        self.workers = [worker.remote(kind, tiny, others[0])]
        if len(others) > 1:
            self.workers = [
                worker.remote(kind, tiny, other, rank, len(others), meeting)
                for rank, other in enumerate(others)
            ]
        self.worker = self.workers[0]
        self.trainer = trainer.remote(kind, tiny, own)
        self.num_bytes = 0
        self.describe: dict[str, str] = {}

    def wait(self) -> None:
        """Until both are there."""
        self.num_bytes = self.get(self.trainer.num_bytes.remote())
        self.describe = self.each("describe")[0]

    def device_copy_seconds(self, to: str) -> float:
        """Of as many bytes as a sync moves."""
        return self.get(self.trainer.device_copy_seconds.remote(self.num_bytes, to))

    def get(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=CALL_SECONDS)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """What every worker answers."""
        return self.get([getattr(each, method).remote(*arguments) for each in self.workers])

    def ours(self, name: str, max_chunk_bytes: int, num_slots: int, lookahead: int) -> None:
        """Measure our backend with the options of ``VARIANTS[name]``."""

        def attach() -> float:
            self.each("use", "rdt", VARIANTS[name])
            return self.get(
                self.trainer.use_rdt.remote(self.workers, max_chunk_bytes, num_slots, lookahead)
            )

        result = self._measure(name, attach)
        if result.error:
            return
        result.plan = Counter[str]()
        for plan in self.each("plan"):
            result.plan.update(plan)
        self.num_bytes = result.plan["direct_bytes"] + result.plan["staged_bytes"]
        self._trace(result)

    def theirs(self, name: str, backend: str, packed: bool = False) -> None:
        """Measure one of vLLM's backends."""

        def attach() -> float:
            self.get(self.worker.use.remote(backend, {}))
            return self.get(self.trainer.use_vllm.remote(self.worker, backend, NAMESPACE, packed))

        self._measure(name, attach)

    def _measure(self, name: str, attach: Any) -> Result:
        result = self.results[name] = Result()
        try:
            result.init_seconds = attach()
            for _ in range(self._syncs + 1):
                began, ended = self._sync()
                result.seconds.append(ended - began)
            found = self.each("num_wrong", self._version)
            result.wrong = sum(wrong for wrong, _ in found), sum(count for _, count in found)
        except Exception as error:  # a row of the table: the others are measured all the same
            result.error = f"{type(error).__name__}: {error}".strip()[-2000:]
        return result

    def _sync(self) -> tuple[float, float]:
        self._version += 1
        self.get(self.trainer.set_version.remote(self._version))
        return self.get(self.trainer.sync.remote())

    def _trace(self, result: Result) -> None:
        """Syncs with their stages recorded: the median one's."""
        for actor in (self.trainer, self.worker):
            self.get(actor.record.remote(True))
        traces = []
        for _ in range(3):
            start, end = self._sync()
            calls, facts = self.get(self.worker.trace.remote())
            ours = self.get(self.trainer.intervals.remote())
            both = numbered([*ours, *on_their_way(ours, calls), *calls])
            traces.append(Trace(start, end, both, facts))
        for actor in (self.trainer, self.worker):
            self.get(actor.record.remote(False))
        trace = sorted(traces, key=lambda each: each.end - each.start)[1]
        result.busy, result.blame = busy(trace), blame(trace)
        for stage, index, began, ended in sorted(trace.intervals, key=lambda each: each.start):
            ms = [round((each - trace.start) * 1e3, 3) for each in (began, ended)]
            result.trace.append((stage, index, ms[0], ms[1]))

    def end(self) -> None:
        try:
            self.get(self.trainer.end.remote())
        finally:
            for actor in (*self.workers, self.trainer):
                self._ray.kill(actor)


def _tables(bench: Bench, limits: dict[str, float]) -> list[Table]:
    peer = bench.results.get("vllm sharded_rdt")
    rate = bench.num_bytes / 1e9
    times = Table(
        "path", "first, ms", "median, ms", "GB/s", "x sharded_rdt", "target", "differ",
        title=f"{bench.kind}: {bench.num_bytes} bytes a sync",
    )  # fmt: skip
    for name, seconds in limits.items():
        times.add_row(name, "", f"{seconds * 1e3:.2f}", f"{rate / seconds:.0f}", "", "", "")
    for name, result in bench.results.items():
        if result.error or len(result.seconds) < 2:
            times.add_row(name, "", "failed", "", "", "", "")
            continue
        ratio = peer.median / result.median if peer and len(peer.seconds) > 1 else 0.0
        target = TARGETS.get((bench.kind, name), 0.0)
        met = "" if not (target and ratio) else "met" if ratio >= target else "missed"
        times.add_row(
            name,
            f"{result.seconds[0] * 1e3:.1f}",
            f"{result.median * 1e3:.2f}",
            f"{rate / result.median:.0f}",
            f"{ratio:.1f}" if ratio else "",
            f"{target:.0f} {met}" if target else "",
            "" if result.wrong is None else f"{result.wrong[0]} of {result.wrong[1]}",
        )
    traced = {name: each for name, each in bench.results.items() if each.blame}
    where = Table("stage", title=f"{bench.kind}: where one warm sync's time went, ms")
    for name in traced:
        where.add_column(f"{name}: busy")
        where.add_column(f"{name}: blame")
    for stage in (*STAGES, UNATTRIBUTED):
        cells = []
        for each in traced.values():
            cells += [f"{found.get(stage, 0.0) * 1e3:.2f}" for found in (each.busy, each.blame)]
        where.add_row(stage, *cells)
    return [times, where]


def _raw_reads(kind: str, tiny: bool, devices: tuple[str, str], num_threads: int) -> list[RawReads]:
    """None where they fail: the rest is measured all the same."""
    try:
        return raw_reads(kind, tiny, devices, num_threads)
    except RuntimeError as error:
        logging.error("%s, %d threads: %s", kind, num_threads, error)
        return []


def main(
    kinds: Annotated[str, typer.Option(help="models, by comma")] = ",".join(MODELS),
    device: Annotated[str, typer.Option(help="cuda, or cpu to try this out")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="small layers")] = False,
    syncs: Annotated[int, typer.Option(help="warm syncs a path")] = 5,
    peers: Annotated[str, typer.Option(help="vLLM's backends, by comma")] = "sharded_rdt,ipc",
    variants: Annotated[str, typer.Option(help="ours, by comma")] = ",".join(VARIANTS),
    max_chunk_mib: Annotated[int, typer.Option(help="largest chunk of ours")] = 1280,
    threads: Annotated[str, typer.Option(help="that post the raw reads, by comma")] = "0,4,8",
    slots: Annotated[int, typer.Option(help="slots of our rings")] = 2,
    lookahead: Annotated[int, typer.Option(help="groups gathered ahead, of ours")] = 1,
    gpus: Annotated[int, typer.Option(help="1, or 2: the trainer's and the worker's")] = 1,
    tp: Annotated[int, typer.Option(help="1, or 2 workers, one on each GPU; ours only")] = 1,
) -> None:
    """Print the tables of every model, and one JSON line."""
    import ray

    devices: tuple[str, ...] = (device, device)
    if gpus > 1 or tp > 1:  # each process sees both, or none could map the other's memory
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        indexed = [f"{device}:{index}" for index in range(2)] if is_gpu(device) else [device] * 2
        devices = (indexed[0], *indexed) if tp > 1 else tuple(indexed)
    ray.init(
        num_cpus=16,
        num_gpus=gpus if is_gpu(device) else 0,
        include_dashboard=False,
        namespace=NAMESPACE,
        object_store_memory=1 << 30,
        logging_level=logging.ERROR,
    )
    console, found = Console(width=140), dict[str, Any]()
    chosen = [each for each in kinds.split(",") if each in MODELS]
    limits = {kind: dict[str, float]() for kind in chosen}
    for kind, num_threads in product(chosen, [int(each) for each in threads.split(",") if each]):
        if kind != "rank":  # it reads parts
            for reads in _raw_reads(kind, tiny, (devices[0], devices[-1]), num_threads):
                row = f"raw prepared reads, {reads.how}, {num_threads} threads"
                limits[kind][row] = reads.median
                console.print(f"{kind}: {row}: {reads.num_regions} regions", style="dim")
    folder = tempfile.TemporaryDirectory(prefix="rdt-bench-")
    benches = [  # they start side by side
        Bench(kind, tiny, devices, syncs, f"{folder.name}/{kind}") for kind in chosen
    ]
    for bench in benches:
        bench.wait()
    for bench in benches:
        began = time.perf_counter()
        try:
            for name in [each for each in variants.split(",") if each]:
                bench.ours(name, max_chunk_mib << 20, slots, lookahead)
            # A rank has no engine that a peer could drive.
            for backend in [each for each in peers.split(",") if each and bench.kind != "rank"]:
                if tp == 1:
                    bench.theirs(f"vllm {backend}", backend)
            limits[bench.kind]["device copy"] = bench.device_copy_seconds(devices[0])
            if gpus > 1:
                limits[bench.kind]["peer copy"] = bench.device_copy_seconds(devices[-1])
        finally:
            bench.end()
        for table in _tables(bench, limits[bench.kind]):
            console.print(table)
        for name, result in bench.results.items():
            console.print(f"{name}: {result.error or result.plan}", style="dim")
        spent = time.perf_counter() - began
        console.print(f"{bench.kind}: {bench.describe}, {spent:.0f} s", style="dim")
        found[bench.kind] = {
            "num_bytes": bench.num_bytes,
            "limits": limits[bench.kind],
            **{name: vars(result) for name, result in bench.results.items()},
        }
        print(json.dumps({bench.kind: found[bench.kind]}), flush=True)
    ray.shutdown()
    folder.cleanup()
    print(json.dumps({"bench": "gpu", **found}))


if __name__ == "__main__":
    typer.run(main)
