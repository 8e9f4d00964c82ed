"""How fast copy tables pack and scatter on one GPU, as fractions of a device copy.

The reference is one `copy_` of as many contiguous bytes. Every way of copying is compared bit by
bit with `torch._foreach_copy_` in the same run. Each workload moves far more than the L2 cache
holds, and its packed buffer alternates, so that no pass finds its bytes there.

    PYTHONPATH=packages/rdt-plan/src:packages/rdt-transport/src python3 bench/gpu_copies.py
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from rdt_plan.layout import pack_layouts
from rdt_transport.copies import Copy, CopyTable
from rdt_transport.copy_tiles import Tiling

ITEM = 2  # bfloat16
Sides = Sequence[tuple[list[Tensor], list[Tensor]]]
"""Sources and targets, for every other repeat."""

TILINGS = (
    Tiling(16 << 10, 4, 4),
    Tiling(8 << 10, 4, 4),
    Tiling(8 << 10, 2, 4),
    Tiling(8 << 10, 8, 2),
    Tiling(4 << 10, 2, 4),
    Tiling(4 << 10, 4, 2),
    Tiling(4 << 10, 1, 8),
)
CHUNK_COPIES = 388  # slices of one chunk of a mixture's layer


@dataclass(frozen=True)
class Workload:
    """Copies between one list of strided bases and one packed buffer."""

    name: str
    copies: list[Copy]
    source_bytes: list[int]
    target_bytes: list[int]

    def reversed(self, name: str) -> "Workload":
        """From the packed bytes back to where they came from."""
        copies = [
            Copy(
                each.target,
                each.source,
                each.target_offset,
                each.source_offset,
                each.shape,
                each.target_strides,
                each.source_strides,
                each.item_bytes,
            )
            for each in self.copies
        ]
        return Workload(name, copies, self.target_bytes, self.source_bytes)


Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Base, first element, shape and strides."""


def packing(name: str, base_elements: Sequence[int], regions: Sequence[Region]) -> Workload:
    layout = pack_layouts([prod(shape) * ITEM for _, _, shape, _ in regions])[0]
    copies = [
        Copy(base, 0, first * ITEM, at, shape, strides, _contiguous(shape), ITEM)
        for (base, first, shape, strides), at in zip(regions, layout.offsets, strict=True)
    ]
    return Workload(name, copies, [n * ITEM for n in base_elements], [layout.num_bytes])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def whole_tensors(layers: int, scale: int) -> Workload:
    """Every tensor of layers of Qwen3-8B, whole."""
    hidden, inner = 4096 // scale, 12288 // scale
    shapes = [(hidden,)] * 2 + [(128,)] * 2
    shapes += [(hidden, hidden)] * 2 + [(1024 // scale, hidden)] * 2
    shapes += [(inner, hidden)] * 2 + [(hidden, inner)]
    elements = [prod(shape) for _ in range(layers) for shape in shapes]
    regions = [(base, 0, (count,), (1,)) for base, count in enumerate(elements)]
    return packing("pack whole tensors (8B)", elements, regions)


def rank_of_experts(layers: int, scale: int, size: int = 8) -> tuple[Workload, Workload]:
    """What rank 1 of TP=8 reads of layers of Qwen3-235B; and its scatter into fused tensors."""
    hidden, inner, experts = 4096 // scale, 1536 // scale, 128
    query, key = 8192 // scale, 128 // min(scale, 16)
    elements: list[int] = []
    regions: list[Region] = []
    targets: list[tuple[int, int]] = []  # base and first element
    target_elements: list[int] = []

    def whole(*shape: int) -> int:
        elements.append(prod(shape))
        return len(elements) - 1

    def rows(count: int, columns: int, part: int, target: int, at: int) -> None:
        regions.append((whole(count * size, columns), part * columns, (count * columns,), (1,)))
        targets.append((target, at))

    def columns_of(count: int, width: int, target: int, at: int) -> None:
        base = whole(count, width * size)
        regions.append((base, width, (count, width), (width * size, 1)))
        targets.append((target, at))

    part = inner // size
    for _ in range(layers):
        qkv, out, gate, norms, up, down = range(len(target_elements), len(target_elements) + 6)
        heads = query // size
        rows(heads, hidden, heads, qkv, 0)
        rows(key, hidden, 0, qkv, heads * hidden)
        rows(key, hidden, 0, qkv, (heads + key) * hidden)
        columns_of(hidden, heads, out, 0)
        rows(experts, hidden, 0, gate, 0)
        for at in range(2):
            rows(1, hidden, 0, norms, at * hidden)
        for expert in range(experts):
            for half in range(2):
                rows(part, hidden, part, up, (2 * expert + half) * part * hidden)
            columns_of(hidden, part, down, expert * hidden * part)
        target_elements += [(heads + 2 * key) * hidden, hidden * heads, experts * hidden]
        target_elements += [2 * hidden, experts * 2 * part * hidden, experts * hidden * part]
    pack = packing("pack a TP=8 rank (235B)", elements, regions)
    copies = []
    for each, (base, first) in zip(pack.copies, targets, strict=True):
        steps = _contiguous(each.shape)
        at = each.target_offset
        copies.append(Copy(0, base, at, first * ITEM, each.shape, steps, steps, ITEM))
    bases = [count * ITEM for count in target_elements]
    return pack, Workload("scatter a TP=8 rank (235B)", copies, pack.target_bytes, bases)


def transposed(count: int, scale: int) -> Workload:
    """Square matrices, each packed in the order of its columns."""
    side = 4096 // scale
    regions = [(base, 0, (side, side), (1, side)) for base in range(count)]
    return packing("pack transposed", [side * side] * count, regions)


class Bench:
    """Times calls on a device; on a CPU by the clock, to try the script out."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.repeats = repeats

    def milliseconds(self, call: Callable[[int], object]) -> float:
        """Median of one ``call`` after two to warm up; it gets the number of the repeat."""
        times = []
        for turn in range(self.repeats + 2):
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(2_000_000)  # the host gets ahead: launches are not timed
                start.record()
                call(turn)
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            else:
                begin = time.perf_counter()
                call(turn)
                times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[2:])

    def host_microseconds(self, call: Callable[[int], object]) -> float:
        """Median of what one ``call`` costs its thread; the device's work is not waited for."""
        times = []
        for turn in range(self.repeats + 2):
            if self.on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call(turn)
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times[2:])

    def random(self, num_bytes: int) -> Tensor:
        count = -(-num_bytes // 8)
        draws = torch.randint(-(1 << 62), 1 << 62, (count,), device=self.device)
        return draws.view(torch.uint8)[:num_bytes]

    def zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def run(self, work: Workload, tilings: Sequence[Tiling]) -> dict[str, Any]:
        sources = [self.random(count) for count in work.source_bytes]
        targets = [self.zeros(count) for count in work.target_bytes]
        sides = [(sources, targets), (_other(sources), _other(targets))]
        moved = sum(prod(each.shape) * each.item_bytes for each in work.copies)
        copy_ms = self.device_copy(moved)
        foreach_ms, loop_ms = self.views(work, sides)
        wanted = [target.clone() for target in targets]
        tables = {}
        for tiling in tilings:
            table = CopyTable(work.copies, self.device, tiling=tiling)
            for target in (*sides[0][1], *sides[1][1]):
                target.zero_()
            tables[label(tiling)] = copy_ms / self.milliseconds(partial(_run, table, sides))
            for _, written in sides:
                if not all(map(torch.equal, written, wanted)):
                    raise SystemExit(f"{work.name}, tiles {label(tiling)}: wrong bytes")
        return {
            "bytes": moved,
            "copies": len(work.copies),
            "copy_ms": copy_ms,
            "foreach": copy_ms / foreach_ms,
            "loop": copy_ms / loop_ms,
            "tables": tables,
            **self.host(work, sides),
        }

    def device_copy(self, num_bytes: int) -> float:
        """Milliseconds of one copy of as many contiguous bytes."""
        source = self.random(num_bytes)
        target = torch.empty_like(source)
        return self.milliseconds(lambda turn: target.copy_(source))

    def views(self, work: Workload, sides: Sides) -> tuple[float, float]:
        """Milliseconds of one `_foreach_copy_` and of a loop of `copy_`, over views made before."""
        pairs = [
            (_views(work.copies, sources, False), _views(work.copies, targets, True))
            for sources, targets in sides
        ]

        def foreach(turn: int) -> None:
            sources, targets = pairs[turn % 2]
            torch._foreach_copy_(targets, sources)

        def loop(turn: int) -> None:
            for source, target in zip(*pairs[turn % 2], strict=True):
                target.copy_(source)

        return self.milliseconds(foreach), self.milliseconds(loop)

    def host(self, work: Workload, sides: Sides) -> dict[str, float]:
        """What one chunk's run costs its thread: with the bases it had, and with others."""
        chunk = work.copies[:CHUNK_COPIES]
        table = CopyTable(chunk, self.device)
        same = self.host_microseconds(partial(_run, table, sides[:1]))
        other = self.host_microseconds(partial(_run, table, sides))
        begin = time.perf_counter()
        _run(CopyTable(chunk, self.device), sides, 0)
        first_ms = (time.perf_counter() - begin) * 1e3
        return {"host_us_same": same, "host_us_other": other, "first_run_ms": first_ms}


def _run(table: CopyTable, sides: Sides, turn: int) -> None:
    table.run(*sides[turn % len(sides)])


def _other(bases: list[Tensor]) -> list[Tensor]:
    """Bases of the same contents: others if it is the packed buffer."""
    return [bases[0].clone()] if len(bases) == 1 else bases


def _views(copies: Sequence[Copy], bases: Sequence[Tensor], is_target: bool) -> list[Tensor]:
    """One side of the copies as a caller without tables would make them: bfloat16 views."""
    found = []
    for each in copies:
        base = bases[each.target if is_target else each.source].view(torch.bfloat16)
        first = (each.target_offset if is_target else each.source_offset) // ITEM
        strides = each.target_strides if is_target else each.source_strides
        found.append(base.as_strided(each.shape, strides, base.storage_offset() + first))
    return found


def label(tiling: Tiling) -> str:
    return f"{tiling.tile_bytes >> 10}K/{tiling.num_warps}/{tiling.units_per_thread}"


def report(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name:<28} {found['bytes'] / 1e9:5.2f} {found['copies']:>6} "
        f"{found['bytes'] / found['copy_ms'] / 1e6:8.0f} {found['foreach']:8.2f} "
        f"{found['loop']:6.2f}"
        + "".join(f"{value:9.2f}" for value in found["tables"].values())
        + f" {found['host_us_same']:9.0f} {found['host_us_other']:9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--scale", type=int, default=1, help="divide all dimensions, to try it out")
    options = parser.parse_args()
    device = torch.device(options.device)
    bench = Bench(device, options.repeats)
    on_gpu = device.type == "cuda"
    pack, scatter = rank_of_experts(3, options.scale)
    works = [
        whole_tensors(5, options.scale),
        whole_tensors(5, options.scale).reversed("scatter whole tensors (8B)"),
        pack,
        scatter,
        pack.reversed("scatter into columns (235B)"),
        transposed(48, options.scale),
        transposed(48, options.scale).reversed("scatter transposed"),
    ]
    print("Fractions of a device copy; tables by tile bytes/warps/units a thread.")
    print(
        f"{'':<28} {'GB':>5} {'copies':>6} {'copy GB/s':>8} {'foreach':>7} {'loop':>6}"
        + "".join(f"{label(tiling):>9}" for tiling in TILINGS)
        + f" {'us same':>9} {'us other':>9}"
    )
    results = {}
    for work in works:
        results[work.name] = bench.run(work, TILINGS)
        print(report(work.name, results[work.name]), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "gpu_copies": results}))


if __name__ == "__main__":
    main()
