"""One table: what a whole weight sync takes on one GPU or two, ours beside vLLM's and the limits.

Everything is measured in one run on the same bytes: a trainer and a worker in processes of their
own, on one GPU, driven over Ray by both sides' own clients. Each sync carries new weights and is
timed from its first call to its last; the first is shown apart, the others as their median. After
the last one the worker's parameters are compared, bit for bit, with what vLLM's own loader writes.
On a CPU, whose kernels pack parameters and leave them empty, those count as different.

With ``--trainers 2`` the trainer is two ranks of FSDP2, on a GPU each, and a sync lasts from when
the first began it until the last one returned; ours only, and without the stages of a sync, which
are recorded of one rank. Of several combinations of settings only a variant's first has them.

The last line is one JSON object. The exit status is 1 where a path failed, or, on a GPU, differs.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.gpu.devices import Devices, is_gpu, placed
from bench.gpu.limits import RawReads, raw_reads
from bench.gpu.measured import Bench, Result
from bench.gpu.models import MODELS
from bench.gpu.tables import tables
from bench.gpu.ways import SOURCES, VARIANTS, Way, numbers, ways

NAMESPACE = "rdt-bench"


def _raw_reads(kind: str, tiny: bool, devices: Devices, num_threads: int) -> list[RawReads]:
    """None where they fail: the rest is measured all the same."""
    try:
        ends = devices.trainers[0], devices.workers[-1]
        return raw_reads(kind, tiny, ends, num_threads)
    except RuntimeError as error:
        logging.error("%s, %d threads: %s", kind, num_threads, error)
        return []


def _copies(bench: Bench, devices: Devices) -> dict[str, float]:
    """Seconds of plain copies; none where they fail."""
    here, there = devices.trainers[0], devices.workers[-1]
    try:
        found = {"device copy": bench.device_copy_seconds(here)}
        if there != here:
            found["peer copy"] = bench.device_copy_seconds(there)
    except Exception as error:
        logging.error("%s: no copies: %s", bench.kind, error)
        return {}
    return found


def _has_started(bench: Bench, found: dict[str, Any]) -> bool:
    """Waits for its processes; they are ended where one has not started, and ``found`` says so."""
    try:
        bench.wait()
    except Exception as error:
        logging.error("%s did not start: %s", bench.kind, error)
        found[bench.kind] = {"error": str(error)[-2000:]}
        bench.end()
        return False
    return True


def _measured(
    bench: Bench, chosen: list[Way], lookahead: int, backends: list[str]
) -> Iterator[tuple[str, Result]]:
    """All paths, each as soon as it was measured; one that failed is a result with its error."""
    for way in chosen:
        yield way.name, bench.ours(way, lookahead)
    for backend in backends:
        name = f"vllm {backend}"
        yield name, bench.theirs(name, backend, NAMESPACE)


def _failed(bench: Bench, device: str) -> list[str]:
    """The paths that did, or, on a GPU, wrote other bytes."""
    return [
        name
        for name, result in bench.results.items()
        if not result.is_whole or (is_gpu(device) and not result.is_exact)
    ]


def main(
    kinds: Annotated[str, typer.Option(help="models, by comma")] = ",".join(MODELS),
    device: Annotated[str, typer.Option(help="cuda, or cpu to try this out")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="small layers")] = False,
    syncs: Annotated[int, typer.Option(min=1, help="warm syncs a path")] = 5,
    peers: Annotated[str, typer.Option(help="vLLM's backends, by comma")] = "sharded_rdt,ipc",
    variants: Annotated[str, typer.Option(help="ours, by comma")] = ",".join(VARIANTS),
    max_chunk_mib: Annotated[str, typer.Option(help="largest chunks of ours, by comma")] = "1280",
    threads: Annotated[str, typer.Option(help="that post the raw reads, by comma")] = "0,4,8",
    slots: Annotated[str, typer.Option(help="slots of our rings, by comma")] = "2",
    read_threads: Annotated[str, typer.Option(help="that post our reads, by comma")] = "",
    lookahead: Annotated[int, typer.Option(help="groups gathered ahead, of ours")] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=2, help="2: the trainer's and the worker's")] = 1,
    tp: Annotated[int, typer.Option(min=1, max=2, help="workers, each on a GPU; ours only")] = 1,
    trainers: Annotated[int, typer.Option(min=1, max=2, help="2: of FSDP2, each on a GPU")] = 1,
    sources: Annotated[str, typer.Option(help="of 2 trainers, by comma")] = ",".join(SOURCES),
) -> None:
    """Print the tables of every model, and one JSON line."""
    import ray

    if unknown := [each for each in kinds.split(",") if each not in MODELS]:
        raise typer.BadParameter(f"no kind {unknown[0]!r}: expected some of {', '.join(MODELS)}")
    devices = placed(device, gpus, trainers, tp)
    if len({*devices.trainers, *devices.workers}) > 1:
        # each process sees both, or none could map the other's memory
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    is_alone = max(trainers, tp) == 1
    chosen_ways = ways(
        [each for each in variants.split(",") if each],
        numbers(slots),
        numbers(max_chunk_mib),
        numbers(read_threads),
        sources.split(",") if trainers > 1 else (),
    )
    ray.init(
        num_cpus=16,
        num_gpus=gpus if is_gpu(device) else 0,
        include_dashboard=False,
        namespace=NAMESPACE,
        object_store_memory=1 << 30,
        logging_level=logging.ERROR,
    )
    console, found = Console(width=140, markup=False), dict[str, Any]()
    # A rank of eight is one worker, and knows of one trainer.
    chosen = [each for each in kinds.split(",") if is_alone or each != "rank"]
    limits = {kind: dict[str, float]() for kind in chosen}
    for kind, num_threads in product(chosen, numbers(threads)):
        if kind != "rank":  # it reads parts
            for reads in _raw_reads(kind, tiny, devices, num_threads):
                row = f"raw prepared reads, {reads.how}, {num_threads} threads"
                limits[kind][row] = reads.median
                console.print(f"{kind}: {row}: {reads.num_regions} regions", style="dim")
    folder = tempfile.TemporaryDirectory(prefix="rdt-bench-")
    benches = [  # they start side by side
        Bench(kind, tiny, devices, syncs, f"{folder.name}/{kind}") for kind in chosen
    ]
    started = [bench for bench in benches if _has_started(bench, found)]
    for bench in started:
        began = time.perf_counter()
        # A rank has no engine that a peer could drive, and peers have one trainer and one worker.
        is_compared = is_alone and bench.kind != "rank"
        backends = [each for each in peers.split(",") if each and is_compared]
        for name, result in _measured(bench, chosen_ways, lookahead, backends):
            milliseconds = [round(each * 1e3, 2) for each in result.seconds]
            console.print(f"{bench.kind}: {name}: {milliseconds} ms, {dict(result.plan)}")
            console.print(result.error or f"differ: {result.wrong}", style="dim")
        limits[bench.kind] |= _copies(bench, devices)
        bench.end()
        for table in tables(bench.kind, bench.num_bytes, limits[bench.kind], bench.results):
            console.print(table)
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
    for left in Path("/dev/shm").glob(f"{Path(folder.name).name}-*"):
        left.unlink()  # by workers on a CPU
    print(json.dumps({"bench": "gpu", **found}))
    failed = [bench.kind for bench in benches if bench not in started]
    failed += [f"{bench.kind} {name}" for bench in started for name in _failed(bench, device)]
    if failed:
        logging.error("failed: %s", ", ".join(failed))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
