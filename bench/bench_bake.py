"""Recording full-size models against vLLM's own recorder: a row each, then one JSON line.

Both run the loaders of one model, one of eight ranks on the meta device, over all names of its
checkpoint, turn by turn in one process, a process a model; then both build a plan of what they
recorded. Ratios are of medians of process CPU time. The peak is that of anonymous memory, in a
forked process of each.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
from torch.utils._python_dispatch import TorchDispatchMode

from bench.child import in_fork
from bench.full_size_model import build_model
from bench.published_sizes import PUBLISHED_SIZES, PublishedSize, weights
from census.modes import Mode
from census.startup import prepare_process
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

MODES = ("tp8r0", "ep8r0")
SAMPLE_SECONDS = 0.005
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
    def consumed(self) -> set[str]:
        return set(self._engine._name_to_plan)


class OnlyCalls(TorchDispatchMode):
    """Sees every operation and does nothing but call it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler and wrap every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


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

    def load_seen(self) -> None:
        """The loaders under a mode that does nothing: what sees every operation pays for that."""
        with OnlyCalls():
            self.load()

    def record(self) -> Recording:
        return record(self._model, self._load_weights, self._params)

    def manifest(self) -> Manifest:
        """One whose digest is known, as a worker has it: that says whether to record at all."""
        manifest = Manifest.build(self._params)
        assert manifest.digest
        return manifest

    def check(self, recording: Recording, plan: SyncPlan, stock_plan: Any) -> None:
        """Refuse to compare unless both read the same bytes of the same names, and all is there.

        Only experts that live on other ranks are left out.
        """
        recording.require_coverage()
        assert recording.consumed == self.stock.consumed, recording.consumed ^ self.stock.consumed
        assert all(".experts." in name for name in recording.ignored), recording.ignored
        assert len(recording.consumed) + len(recording.ignored) == len(self._params)
        landed = sum(prod(write.shape) * item_bytes(write.dtype) for write in recording.writes)
        held = sum(p.numel() * p.element_size() for p in self._model.parameters())
        assert landed == held, (landed, held)
        assert plan.slice_bytes == recording.bytes_pulled == held
        num_keys = sum(len(chunk.keys) for chunk in stock_plan.chunks)
        padding = sum(chunk.pack_bytes for chunk in stock_plan.chunks) - held
        assert 0 <= padding < 16 * num_keys, padding


@dataclass(frozen=True, slots=True)
class Row:
    """What one model gave.

    Attributes:
        num_names: names in its checkpoint.
        record_seconds, stock_seconds, alone_seconds, seen_seconds: process CPU time of our
            recording, of the stock one, of the loaders alone, and under a mode that does nothing.
        bake_ratio, plan_ratio: stock over ours.
        bound_ratio: stock over the loaders alone, which no recorder can exceed.
        seen_ratio: stock over the loaders under a mode that does nothing.
        peak_memory_ratio: ours over stock.
    """

    num_names: int
    record_seconds: float
    stock_seconds: float
    alone_seconds: float
    seen_seconds: float
    bake_ratio: float
    bound_ratio: float
    seen_ratio: float
    plan_ratio: float
    peak_memory_ratio: float


def measured(sizes: PublishedSize, mode: Mode, pairs: int) -> Row:
    """Record, plan, check that both did the same work; once a process."""
    from vllm.config import set_current_vllm_config

    params = weights(sizes)
    with tempfile.TemporaryDirectory() as folder:
        model, config = build_model(Path(folder), sizes, mode)
    with set_current_vllm_config(config), torch.no_grad():
        bench = Bench(model, params)
        bench.load()  # what the loaders import and remember counts for nobody
        our_peak = in_fork(partial(peak_bytes, bench.record))
        stock_peak = in_fork(partial(peak_bytes, bench.stock.record))
        ours, stock, alone, seen, our_plan, stock_plan = [], [], [], [], [], []
        for turn in range(pairs):
            alone.append(cpu_seconds(bench.load)[0])
            seen.append(cpu_seconds(bench.load_seen)[0])
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
    return Row(
        num_names=len(params),
        record_seconds=median(ours),
        stock_seconds=median(stock),
        alone_seconds=median(alone),
        seen_seconds=median(seen),
        bake_ratio=round(median(stock) / median(ours), 2),
        bound_ratio=round(median(stock) / median(alone), 2),
        seen_ratio=round(median(stock) / median(seen), 2),
        plan_ratio=round(median(stock_plan) / median(our_plan), 2),
        peak_memory_ratio=round(our_peak / stock_peak, 2),
    )


def cpu_seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """Process CPU time, and what ``action`` returned; garbage of earlier turns is gone by then."""
    gc.collect()
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def peak_bytes(action: Callable[[], Any]) -> int:
    """How far anonymous memory of this process grows while ``action`` runs."""
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
    peak = max(peak, _anonymous_bytes())
    del result
    return max(peak - before, PAGE_BYTES)


def _anonymous_bytes() -> int:
    """Memory of this process that is no file's, so that code read in late does not count."""
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def main(
    models: Annotated[str, typer.Option(help="which, by commas")] = ",".join(PUBLISHED_SIZES),
    modes: Annotated[str, typer.Option(help="ranks of layouts, by commas")] = ",".join(MODES),
    pairs: Annotated[int, typer.Option(min=1, help="turns of each recorder")] = 5,
    layers: Annotated[int, typer.Option(min=0, help="of each model; 0 is all")] = 0,
) -> None:
    """Print a row for each model in each layout, and one JSON line of all ratios."""
    prepare_process()
    columns = ("model", "rank", "names", "ours", "stock", "loaders", "seen")
    table = Table(*columns, "record", "bound", "seen", "plan", "peak", padding=(0, 0))
    found: dict[str, dict[str, float]] = {}
    for name in models.split(","):
        sizes = PUBLISHED_SIZES[name]
        for mode in modes.split(","):
            cut = replace(sizes, layers=layers or sizes.layers)
            row = in_fork(partial(measured, cut, Mode.parse(mode), pairs))
            times = [value for key, value in asdict(row).items() if key.endswith("_seconds")]
            ratios = {key: value for key, value in asdict(row).items() if key.endswith("_ratio")}
            found[f"{name}:{mode}"] = ratios
            print(f"{name}:{mode}: {ratios}", file=sys.stderr, flush=True)
            table.add_row(
                name,
                mode,
                str(row.num_names),
                *(f"{each:.2f} s" for each in times),
                *(f"{each:.2f}" for each in ratios.values()),
            )
    console = Console()
    console.print(f"CPU time, medians of {pairs} alternating pairs: recording by ours, by stock,")
    console.print("the loaders alone, and the loaders under a mode that does nothing (seen);")
    console.print("stock / ours, stock / loaders (bound), stock / seen; peak is ours / stock")
    console.print(table)
    print(json.dumps({"bench": "bake", "models": found}))


if __name__ == "__main__":
    typer.run(main)
