"""Producers that hold pieces of tensors, over the in-process wire: bytes compared."""

import pytest
import torch

from rdt_plan import Manifest, ParamMeta, Placement, SliceError, canonical, contiguous_stride
from rdt_transport.pack import check_held
from rdt_transport.rendezvous import JobSettings
from rdt_transport.testing.fleet import Fleet, Sink
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire

NUM_WORKERS = 2
RANKS = (2, 0, 3, 1)
HSDP = {"owners": RANKS, "mesh_shape": (2, 2), "placements": ("replicate", "shard(0)")}
FSDP_TP = {"owners": RANKS, "mesh_shape": (2, 2), "placements": ("shard(0,2)", "shard(0)")}
COLUMNS = {"owners": (3, 1), "mesh_shape": (2,), "placements": ("shard(1)",)}
FSDP = {"owners": (0, 1, 2, 3), "mesh_shape": (4,), "placements": ("shard(0)",)}
MANIFEST = Manifest.build(
    [
        ParamMeta("embed", "bfloat16", (9, 6), **FSDP),
        ParamMeta("layers.0.w", "float32", (8, 5), **FSDP_TP),
        ParamMeta("layers.0.norm", "bfloat16", (3,), **FSDP),  # rank 3 holds nothing of it
        ParamMeta("layers.1.w", "float32", (8, 5), **COLUMNS),
        ParamMeta("layers.1.norm", "bfloat16", (7,), **HSDP),
        ParamMeta("layers.2.w", "float32", (8, 5), **HSDP),
        ParamMeta("head", "bfloat16", (4, 6), owners=(1, 2)),
    ]
)


def rows_of(param: ParamMeta, worker: int) -> tuple[int, int]:
    """The first row and the number of rows of a worker; vectors are read whole."""
    if len(param.shape) == 1:
        return 0, param.shape[0]
    first = worker * param.shape[0] // NUM_WORKERS
    return first, (worker + 1) * param.shape[0] // NUM_WORKERS - first


def writes(worker: int) -> list[Placement]:
    """Matrices land transposed."""
    found = []
    for param in MANIFEST.params:
        first, count = rows_of(param, worker)
        shape = (count, *param.shape[1:])
        stride = contiguous_stride(shape)
        region = canonical(param.name, param.dtype, first * stride[0], shape, stride)
        landed = (1, count)[: len(shape)]
        found.append(Placement(region, param.name, "weight", 0, shape, landed, param.dtype, stride))
    return found


def landed(weights: dict[str, torch.Tensor], worker: int) -> dict[tuple[str, str], torch.Tensor]:
    shards = {}
    for param in MANIFEST.params:
        first, count = rows_of(param, worker)
        rows = weights[param.name][first : first + count]
        shards[param.name, "weight"] = (rows.T if rows.dim() == 2 else rows).contiguous()
    return shards


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, generator=generator).to(getattr(torch, p.dtype))
        for p in MANIFEST.params
    }


def test_pieces_of_four_producers_make_whole_tensors() -> None:
    fabric = InProcessFabric()
    job = JobSettings(4, max_chunk_bytes=64)
    sinks = [
        Sink({place: torch.zeros_like(t) for place, t in landed(draw(0), worker).items()})
        for worker in range(NUM_WORKERS)
    ]
    drawn = [writes(worker) for worker in range(NUM_WORKERS)]
    try:
        with Fleet(
            lambda role: InProcessWire(fabric, role), MANIFEST, drawn, sinks, settings=job
        ) as fleet:
            assert {rank for c in fleet.consumers for rank in c.plan.owners} == {0, 1, 2, 3}
            for seed in (1, 2, 3):
                weights = draw(seed)
                fleet.sync(weights)
                for worker, sink in enumerate(sinks):
                    for place, tensor in landed(weights, worker).items():
                        found = sink.destinations[place]
                        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), place
    finally:
        for sink in sinks:
            sink.close()


def test_a_piece_of_another_shape_is_refused_by_name() -> None:
    meta = MANIFEST.param("embed")
    assert check_held(meta, 2, torch.ones(3, 6, dtype=torch.bfloat16)).shape == (3, 6)
    with pytest.raises(SliceError, match=r"embed: the manifest says bfloat16\[3, 6\]"):
        check_held(meta, 2, torch.ones(9, 6, dtype=torch.bfloat16))
    with pytest.raises(SliceError, match=r"embed: rank 3 yielded .* ranks \(0, 1, 2\) hold it"):
        check_held(meta, 3, torch.ones(0, 6, dtype=torch.bfloat16))
