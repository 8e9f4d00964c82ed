"""Ranks that hold parts of a model: pipeline stages, experts, row ranges, and any mix of them."""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_plan import Chunk, ParamMeta
from rdt_plan.testing import num_examples
from rdt_trainer import JobSettings, RdtTrainer, SyncReport
from rdt_trainer.testing import PieceSource, TorchEngineClient
from rdt_transport.pack import torch_dtype
from rdt_transport.rendezvous import host_local
from rdt_transport.wire.base import Wire
from rdt_transport.wire.inprocess import InProcessFabric, InProcessWire
from rdt_transport.wire.nixl import NixlWire

NEVER_SECONDS = 300.0  # of waits that must end before; a test that needs them has failed
MakeWire = Callable[[str], Wire]


@pytest.fixture(params=["inprocess", "nixl"])
def make_wire(request: pytest.FixtureRequest) -> MakeWire:
    if request.param == "nixl":
        return NixlWire
    fabric = InProcessFabric()
    return lambda role: InProcessWire(fabric, role)


def param(name: str, shape: tuple[int, ...], owners: tuple[int, ...], *axes: str) -> ParamMeta:
    """Held whole by each owner, or cut along a mesh of one axis."""
    return ParamMeta(name, "float32", shape, owners, (len(owners),) if axes else (), axes)


def model(num_layers: int = 4) -> list[ParamMeta]:
    """Two pipeline stages of two ranks: experts by name, projections by rows, norms whole."""
    params = [param("embed.w", (10, 6), (0, 1), "shard(0)")]
    for layer in range(num_layers):
        stage = (0, 1) if layer < num_layers // 2 else (2, 3)
        params += [
            param(f"layers.{layer}.norm.w", (6,), stage),
            param(f"layers.{layer}.qkv.w", (9, 6), stage, "shard(0)"),  # of unequal rows
            param(f"layers.{layer}.out.w", (6, 8), stage, "shard(1)"),
            *(param(f"layers.{layer}.experts.{e}.w", (6, 4), (stage[e % 2],)) for e in range(4)),
            param(f"layers.{layer}.fused.w", (4, 6, 4), stage, "shard(0)"),  # experts in one tensor
        ]
    return [
        *params,
        param("norm.w", (6,), (0, 1, 2, 3)),
        param("head.w", (10, 6), (2, 3), "shard(0)"),
    ]


class Ranks:
    """A trainer rank a thread, before one deployment."""

    def __init__(
        self,
        params: list[ParamMeta],
        client: TorchEngineClient,
        make_wire: MakeWire,
        **options: int,
    ) -> None:
        num_ranks = max(max(each.owners) for each in params) + 1
        self.client = client
        self.weights = {
            each.name: torch.zeros(each.shape, dtype=torch_dtype(each.dtype)) for each in params
        }
        self.sources = [PieceSource(params, rank, self.weights) for rank in range(num_ranks)]
        job = JobSettings(num_producers=num_ranks, **options)
        self._cleanup = ExitStack()
        host = host_local("pipelines", secrets.token_hex(16), job)
        self._cleanup.enter_context(closing(host))
        self._pool = self._cleanup.enter_context(ThreadPoolExecutor(num_ranks))
        self.trainers = [
            RdtTrainer(
                source,
                client if rank == 0 else None,
                rank=rank,
                settings=job,
                rendezvous=host.address,
                make_wire=lambda rank=rank: make_wire(f"producer{rank}"),
                timeout_seconds=NEVER_SECONDS,
            )
            for rank, source in enumerate(self.sources)
        ]
        for trainer in reversed(self.trainers):
            self._cleanup.callback(trainer.close)

    def __enter__(self) -> "Ranks":
        list(self._pool.map(RdtTrainer.init, self.trainers))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cleanup.close()

    def send(self) -> list[SyncReport]:
        """New weights, which every worker has bit for bit; each rank's report."""
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape))
        reports = list(self._pool.map(RdtTrainer.send_weights, self.trainers))
        for worker, received in enumerate(self.client.workers):
            for name, tensor in self.weights.items():
                assert torch.equal(received[name], self.client.shard(worker, tensor)), name
        return reports


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_stages_of_expert_parallel_ranks_are_exact(make_wire, num_workers):
    client = TorchEngineClient(make_wire, num_workers=num_workers)
    with Ranks(model(), client, make_wire, max_chunk_bytes=128) as ranks:
        for _ in range(3):
            reports = ranks.send()
        staged = sum(report.bytes_staged for report in reports)
        assert staged == client.bytes_pulled()[1]  # each byte by one rank, none twice


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stage_that_is_slow_does_not_hold_up_the_other(make_wire, slow):
    """One stage yields nothing before the worker has all of the other, however much that is."""
    params = [param(f"layers.{layer}.w", (16, 4), (0 if layer < 6 else 1,)) for layer in range(12)]
    quick = {each.name for each in params if each.owners != (slow,)}
    all_of_it = threading.Event()

    def before_scatter(worker: int, chunk: Chunk) -> None:
        quick.difference_update(region.name for region in chunk.serve.slices)
        if not quick:
            all_of_it.set()

    client = TorchEngineClient(make_wire, before_scatter=before_scatter, direct=False)
    with Ranks(params, client, make_wire) as ranks:

        def wait(name: str) -> None:
            assert all_of_it.wait(60), f"{sorted(quick)} are not there"

        ranks.sources[slow].meanwhile = wait
        ranks.send()


def test_replicated_names_are_spread_over_their_owners(make_wire):
    """Eight equal layers that four ranks hold: each rank serves two of them, once."""
    params = [param(f"layers.{layer}.w", (16, 4), (0, 1, 2, 3)) for layer in range(8)]
    client = TorchEngineClient(make_wire, num_workers=2)
    with Ranks(params, client, make_wire) as ranks:
        served = [report.bytes_staged for report in ranks.send()]
    assert served == [2 * 16 * 4 * 4] * 4


@st.composite
def ownerships(draw: st.DrawFn) -> list[ParamMeta]:
    """Three ranks that hold what they like of each name: whole, by rows, by columns, or by both."""
    ranks = st.sets(st.integers(0, 2), min_size=1).map(lambda each: tuple(sorted(each)))
    params = [param("all.w", (3, 2), (0, 1, 2))]
    for layer in range(draw(st.integers(1, 4))):
        for name in "abc"[: draw(st.integers(1, 3))]:
            shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
            axes = draw(st.sampled_from(((), ("shard(0)",), ("shard(1)",), ("replicate",))))
            params.append(param(f"layers.{layer}.{name}.w", shape, draw(ranks), *axes))
    return params


@given(ownerships(), st.integers(1, 3), st.integers(1, 3), st.sampled_from((16, 64, 1 << 20)))
@settings(max_examples=num_examples(10), deadline=None)
def test_any_mix_is_exact(params, num_workers, num_slots, max_chunk_bytes):
    fabric = InProcessFabric()

    def make_wire(role: str) -> Wire:
        return InProcessWire(fabric, role)

    client = TorchEngineClient(make_wire, num_workers=num_workers)
    options = {"num_slots": num_slots, "max_chunk_bytes": max_chunk_bytes}
    with Ranks(params, client, make_wire, **options) as ranks:
        ranks.send()
