"""Recording Qwen3-235B-A22B against vLLM's own recorder: one table, then one JSON line.

Both run the loaders of one model, one of eight tensor-parallel ranks on the meta device, over its
36,945 names, turn by turn in one process; then both build a plan of what they recorded. Ratios are
of medians of process CPU time. The peak is that of anonymous memory, in a forked process of each.
"""

import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.full_size_model import build_model, weights
from rdt_bake import Recording, record
from rdt_plan import (
    ConsumerId,
    Manifest,
    ParamMeta,
    SyncPlan,
    build_plan,
    gather_groups,
    item_bytes,
)

NUM_LAYERS = 94
SAMPLE_SECONDS = 0.005
PEAK_SECONDS = 120.0
PAGE_BYTES = 4096


class StockRecorder:
    """The recorder of vLLM's ``sharded_rdt`` backend, without the Ray that its engine wants.

    Its two methods touch no more than the fields that are set here.
    """

    def __init__(self, model: nn.Module, params: list[ParamMeta]) -> None:
        from vllm.distributed.weight_transfer import sharded_rdt_engine
        from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter

        names = [param.name for param in params]
        self._names, self._group_lens = names, [len(g.names) for g in gather_groups(names)]
        self._info = sharded_rdt_engine.ShardedRDTWeightTransferInitInfo(
            trainer_actor_names=["trainer"],
            names=names,
            dtype_names=[param.dtype for param in params],
            shapes=[list(param.shape) for param in params],
            group_lens=self._group_lens,
        )
        engine = self._engine = object.__new__(sharded_rdt_engine.ShardedRDTWeightTransferEngine)
        engine.model, engine.device = model, torch.device("cpu")
        engine._router = RdtRouter(
            1, 1, names=names, group_lens=self._group_lens, workers_per_replica=1
        )

    def record(self) -> None:
        self._engine._name_to_plan, self._engine._live_names = {}, set()
        self._engine._bake(self._info)

    def build_plan(self) -> Any:
        return self._engine._build_call_plan(self._names, self._group_lens)

    @property
    def num_names(self) -> int:
        return len(self._engine._name_to_plan)


class Bench:
    """Both recorders over one model, and what each made of it."""

    def __init__(self, model: nn.Module, params: list[ParamMeta]) -> None:
        self._model, self._params = model, params
        self._load_weights: Any = model.load_weights
        self.stock = StockRecorder(model, params)

    def load(self) -> None:
        """The loaders alone: what no recorder can be faster than."""

        def pairs() -> Iterator[tuple[str, Tensor]]:
            for param in self._params:
                dtype = getattr(torch, param.dtype)
                yield param.name, torch.empty(param.shape, dtype=dtype, device="meta")

        self._load_weights(pairs())

    def record(self) -> Recording:
        return record(self._model, self._load_weights, self._params)

    def manifest(self) -> Manifest:
        """One whose digest is known, as a worker has it: that says whether to record at all."""
        manifest = Manifest.build(self._params)
        assert manifest.digest
        return manifest

    def check(self, recording: Recording, plan: SyncPlan, stock_plan: Any) -> None:
        """Refuse to compare unless both read the same bytes of all names, and cover the model."""
        recording.require_coverage()
        expected = {param.name for param in self._params}
        assert recording.consumed == expected, expected ^ recording.consumed
        assert self.stock.num_names == len(expected), self.stock.num_names
        landed = sum(prod(write.shape) * item_bytes(write.dtype) for write in recording.writes)
        held = sum(p.numel() * p.element_size() for p in self._model.parameters())
        assert landed == held, (landed, held)
        assert plan.slice_bytes == recording.bytes_pulled == held
        num_keys = sum(len(chunk.keys) for chunk in stock_plan.chunks)
        padding = sum(chunk.pack_bytes for chunk in stock_plan.chunks) - held
        assert 0 <= padding < 16 * num_keys, padding


def cpu_seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """Process CPU time, and what ``action`` returned; garbage of earlier turns is gone by then."""
    gc.collect()
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def peak_bytes(action: Callable[[], Any]) -> int:
    """How far anonymous memory grows while ``action`` runs, in a process forked for it."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(action, send), daemon=True)
    process.start()
    send.close()
    if not receive.poll(PEAK_SECONDS):
        process.kill()
        raise TimeoutError(f"waited {PEAK_SECONDS} s for the peak memory of {action}")
    peak = receive.recv()
    process.join(PEAK_SECONDS)
    return peak


def _send_peak(action: Callable[[], Any], send: Any) -> None:
    gc.collect()
    before = peak = _anonymous_bytes()
    done = Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, _anonymous_bytes())

    sampler = Thread(target=sample)
    sampler.start()
    result = action()
    done.set()
    sampler.join()
    send.send(max(peak - before, _anonymous_bytes() - before, PAGE_BYTES))
    del result


def _anonymous_bytes() -> int:
    """Memory of this process that is no file's, so that code read in late does not count."""
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def main(
    pairs: Annotated[int, typer.Option(min=1, help="turns of each recorder")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")] = NUM_LAYERS,
) -> None:
    """Record, plan, check that both did the same work, and print ratios of stock to ours."""
    from vllm.config import set_current_vllm_config

    torch.set_num_threads(1)
    params = weights(layers)
    with tempfile.TemporaryDirectory() as folder:
        model, config = build_model(Path(folder), layers)
    with set_current_vllm_config(config), torch.no_grad():
        bench = Bench(model, params)
        bench.load()  # what the loaders import and remember counts for nobody
        our_peak, stock_peak = peak_bytes(bench.record), peak_bytes(bench.stock.record)
        ours, stock, alone, our_plan, stock_plan = [], [], [], [], []
        for turn in range(pairs):
            alone.append(cpu_seconds(bench.load)[0])
            if turn % 2:
                stock.append(cpu_seconds(bench.stock.record)[0])
            seconds, recording = cpu_seconds(bench.record)
            ours.append(seconds)
            if not turn % 2:
                stock.append(cpu_seconds(bench.stock.record)[0])
            manifest, writes = bench.manifest(), recording.writes
            planned = partial(build_plan, manifest, writes, ConsumerId(0, 0), num_workers=1)
            seconds, plan = cpu_seconds(planned)
            our_plan.append(seconds)
            seconds, theirs = cpu_seconds(bench.stock.build_plan)
            stock_plan.append(seconds)
            bench.check(recording, plan, theirs)

    table = Table(
        "median of process CPU time", "ours", "stock", "stock / ours", "the loaders alone"
    )
    for what, mine, other, limit in (
        ("record", ours, stock, f"{median(alone):.3f} s"),
        ("build the plan", our_plan, stock_plan, ""),
    ):
        own, its = median(mine), median(other)
        table.add_row(what, f"{own:.3f} s", f"{its:.3f} s", f"{its / own:.2f}", limit)
    mebibytes = [f"{peak / (1 << 20):.0f} MiB" for peak in (our_peak, stock_peak)]
    table.add_row("peak memory of recording", *mebibytes, f"{stock_peak / our_peak:.2f}", "")
    Console().print(f"{len(params)} names, median of {pairs} alternating pairs")
    Console().print(table)
    ratios = {
        "bake_ratio": round(median(stock) / median(ours), 2),
        "plan_ratio": round(median(stock_plan) / median(our_plan), 2),
        "peak_memory_ratio": round(our_peak / stock_peak, 2),
    }
    print(json.dumps({"bench": "bake", **ratios}))


if __name__ == "__main__":
    typer.run(main)
