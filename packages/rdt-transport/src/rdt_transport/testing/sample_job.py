"""A small model, what workers of it hold, and fleets that serve it."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rdt_plan import Chunk, Manifest, ParamMeta, Placement, canonical, contiguous_stride
from rdt_transport.events import events_of
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Fleet, Sink
from rdt_transport.testing.wire_pair import MakeWire, expect_bytes
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

__all__ = [
    "draw",
    "expect_exact",
    "expect_shard",
    "in_process",
    "model",
    "open_fleet",
    "shards",
    "shards_of",
    "sink_of",
    "stable_tensors",
]


def in_process() -> MakeWire:
    """Wires that reach each other, within this process."""
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


def model(
    num_layers: int = 3, rows: int = 8, owners: tuple[tuple[int, ...], ...] = ((0,),)
) -> Manifest:
    """Embedding, layers of a matrix, a bias and a norm, and a head; layers spread over owners."""
    params = [ParamMeta("embed", "bfloat16", (rows, 6), owners[0])]
    for layer in range(num_layers):
        held = owners[layer * len(owners) // num_layers]
        params += [
            ParamMeta(f"layers.{layer}.w", "float32", (rows, 5), held),
            ParamMeta(f"layers.{layer}.b", "float32", (rows,), held),
            ParamMeta(f"layers.{layer}.norm", "bfloat16", (7,), held),
        ]
    params.append(ParamMeta("head", "bfloat16", (rows, 6), owners[-1]))
    return Manifest.build(params)


def draw(manifest: Manifest, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype))
        for p in manifest.params
    }


def stable_tensors(
    manifest: Manifest,
    rank: int,
    names: Collection[str] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Zeros for what ``rank`` holds of these names (None: of all), those of a dtype in one storage,
    as flat parameters are."""
    held = {
        param.name: meta
        for param in manifest.params
        if (meta := param.held_by(rank)) is not None and (names is None or param.name in names)
    }
    found = {}
    for dtype in {meta.dtype for meta in held.values()}:
        metas = [meta for meta in held.values() if meta.dtype == dtype]
        count = sum(meta.numel for meta in metas)
        flat = torch.zeros(count, dtype=getattr(torch, dtype), device=device)
        pieces = flat.split([meta.numel for meta in metas])
        found |= {m.name: each.view(m.shape) for m, each in zip(metas, pieces, strict=True)}
    return found


def shards(manifest: Manifest, worker: int, num_workers: int) -> list[Placement]:
    """What a worker loads: its rows of every parameter, but norms whole."""
    writes = []
    for param in manifest.params:
        shape, offset = param.shape, 0
        if not param.name.endswith("norm"):
            rows = shape[0] // num_workers
            offset = worker * rows * (param.numel // shape[0])
            shape = (rows, *shape[1:])
        stride = contiguous_stride(shape)
        module, _, name = param.name.rpartition(".")
        region = canonical(param.name, param.dtype, offset, shape, stride)
        writes.append(Placement(region, module, name, 0, shape, stride, param.dtype, stride))
    return writes


def shards_of(
    weights: Mapping[str, torch.Tensor], worker: int, num_workers: int
) -> dict[tuple[str, str], torch.Tensor]:
    """What the worker must hold then, computed without a plan."""
    held = {}
    for name, tensor in weights.items():
        module, _, param = name.rpartition(".")
        whole = name.endswith("norm")
        held[module, param] = tensor if whole else tensor.chunk(num_workers)[worker]
    return held


def expect_exact(fleet: Fleet, weights: Mapping[str, torch.Tensor], *indices: int) -> None:
    """These consumers (none named: all) hold their shards, bit for bit."""
    for index in indices or range(len(fleet.consumers)):
        who, num_workers = fleet.identity(index)
        expect_shard(fleet.sinks[index], weights, who.worker, num_workers)


def expect_shard(
    sink: Sink, weights: Mapping[str, torch.Tensor], worker: int, num_workers: int
) -> None:
    """This worker's destinations, on any device, hold its shards, bit for bit."""
    for place, tensor in shards_of(weights, worker, num_workers).items():
        found = sink.destinations[place].cpu()
        expect_bytes(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def sink_of(
    writes: Sequence[Placement],
    device: torch.device | str = "cpu",
    before: Callable[[Chunk], None] | None = None,
) -> Sink:
    """Scatters what these writes take into zeros on ``device``."""
    zeros = {
        (w.module, w.param): torch.zeros(w.shape, dtype=getattr(torch, w.dtype), device=device)
        for w in writes
    }
    return Sink(zeros, before, events_of(device))


@contextmanager
def open_fleet(
    make_wire: MakeWire,
    manifest: Manifest,
    settings: JobSettings,
    replicas: Sequence[int] = (2,),
    writes: Sequence[Sequence[Placement]] | None = None,
    *,
    sources: Sequence[Mapping[str, torch.Tensor]] | None = None,
    live: Collection[tuple[str, str]] | None = None,
    max_direct_bytes: int = 1 << 30,
) -> Generator[Fleet]:
    """A fleet whose consumers write (None: their `shards`) into zeros.

    Its producers have these stable tensors (see `stable_tensors`), by rank.
    """
    if writes is None:
        writes = [shards(manifest, w, size) for size in replicas for w in range(size)]
    sinks = [sink_of(each) for each in writes]
    try:
        with Fleet(
            make_wire,
            manifest,
            writes,
            sinks,
            settings=settings,
            replicas=replicas,
            sources=sources,
            live=live,
            max_direct_bytes=max_direct_bytes,
        ) as fleet:
            yield fleet
    finally:
        for sink in sinks:
            sink.close()
