"""vLLM's own trainer interface over ours: its factory, its sources, its clients, unchanged.

Runs against the installed vLLM, or against the files of another one: see `tests.vllm_tree`.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rdt_trainer import HttpClient, RayClient, SettingsError, SyncReport
from rdt_trainer.four_calls import FourCallsClient
from rdt_trainer.testing import TorchEngineClient
from rdt_transport.wire.nixl import NixlWire
from tests.vllm_tree import use_tree

use_tree()

from vllm.distributed import weight_transfer as stock  # noqa: E402
from vllm.distributed.weight_transfer.sharded_rdt_trainer import (  # noqa: E402
    ShardedRDTTrainerInitInfo,
)

from rdt_trainer import vllm_api  # noqa: E402

HAS_PLACEMENTS = hasattr(stock, "Shard")  # 0.33: owners in the metadata, and how they cut a tensor


class Four:
    """vLLM's four calls, in front of a deployment without an engine."""

    def __init__(self, num_workers: int = 1) -> None:
        self.engine = TorchEngineClient(NixlWire, num_workers=num_workers, timeout_seconds=60)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init(init_info)

    def start_weight_update(self) -> None:
        self.engine.start()

    def update_weights(self, update_info: Any) -> None:
        self.engine.update(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish(weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        self.engine.shutdown()

    def assert_holds(self, expected: dict[str, torch.Tensor]) -> None:
        for worker, held in enumerate(self.engine.workers):
            assert held.keys() == expected.keys()
            for name, tensor in expected.items():
                part = self.engine.shard(worker, tensor).contiguous()
                assert torch.equal(held[name].view(torch.uint8), part.view(torch.uint8)), name


class Model(nn.Module):
    """Rows that ranks cut unevenly; fp32 and bf16. It is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.norm = nn.Linear(5, 3).bfloat16()


def model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model(seed).named_parameters()}


def draw(module: nn.Module, seed: int) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, param in module.named_parameters():
            new = weights(seed)[name]
            if isinstance(param, DTensor):
                new = distribute_tensor(new, param.device_mesh, param.placements)
            param.copy_(new)


def sharded_info(rank: int, **options: Any) -> ShardedRDTTrainerInitInfo:
    """A script's own, of which it has changed the backend's name."""
    info = ShardedRDTTrainerInitInfo(rank=rank, **{"num_consumers": 1, **options})
    info.backend = "rdt"  # type: ignore[misc]
    return info


# ---- one rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_info", [vllm_api.RdtTrainerInitInfo, sharded_info])
def test_the_factory_makes_it_and_two_syncs_are_exact(make_info: Callable[..., Any]) -> None:
    module, four = model(1), Four(num_workers=2)
    engine = stock.WeightTransferTrainerFactory.trainer_init(
        make_info(rank=0, num_consumers=2), client=four, source=stock.ModuleSource(module)
    )
    assert isinstance(engine, vllm_api.RdtTrainerWeightTransferEngine)
    assert isinstance(engine, stock.TrainerWeightTransferEngine)
    assert (engine.is_sender, engine.rank) == (True, 0)
    try:
        for seed in (2, 3):
            draw(module, seed)
            report = engine.send_weights()
            assert isinstance(report, SyncReport) and report.committed == (0,)
            four.assert_holds(weights(seed))
        engine.send_weights(live_consumer_ids=[0, 1], weight_version="step-7")
        assert four.engine.weight_version == "step-7"
        with pytest.raises(SettingsError, match=r"some of consumers 0 to 1, .* client 0"):
            engine.send_weights([1])
    finally:
        engine.shutdown()
    engine.shutdown()
    assert four.engine.calls[-1] == "shutdown"


def test_a_list_of_clients_is_a_list_of_deployments() -> None:
    module, fours = model(1), [Four(1), Four(2)]
    engine = vllm_api.RdtTrainerWeightTransferEngine.trainer_init(
        vllm_api.RdtTrainerInitInfo(rank=0, max_chunk_bytes=256),
        client=fours,
        source=stock.ModuleSource(module),
    )
    try:
        assert engine.send_weights().committed == (0, 1)
        for four in fours:
            four.assert_holds(weights(1))
    finally:
        engine.shutdown()


def test_only_live_consumers_take_part() -> None:
    module, fours = model(1), [Four(2), Four(2), Four(2)]
    engine = vllm_api.RdtTrainerWeightTransferEngine.trainer_init(
        vllm_api.RdtTrainerInitInfo(rank=0, num_consumers=6, max_chunk_bytes=256),
        client=fours,
        source=stock.ModuleSource(module),
    )

    def expect(holding: list[int], seed: int, committed: tuple[int, ...], live: Any) -> None:
        draw(module, seed)
        report = engine.send_weights(live)
        assert (report.committed, report.dropped) == (committed, {})
        for at, four in enumerate(fours):
            assert (four.engine.calls[-1] == "finish") == (at in holding)
            if at in holding:
                four.assert_holds(weights(seed))

    try:
        expect([0, 1, 2], 2, (0, 1, 2), range(6))
        expect([0, 2], 3, (0, 2), [4, 5, 0, 1])
        expect([0, 2], 4, (0, 2), {0, 1, 4, 5})
        expect([1, 2], 5, (2, 3), [2, 3, 4, 5])  # numbers of replicas are given once
        expect([0, 1, 2], 6, (2, 3, 4), None)
    finally:
        engine.shutdown()


def test_one_that_is_called_live_and_is_not_holds_up_nobody() -> None:
    module, fours = model(1), [Four(1), Four(1)]
    engine = vllm_api.RdtTrainerWeightTransferEngine.trainer_init(
        vllm_api.RdtTrainerInitInfo(rank=0, num_consumers=2),
        client=fours,
        source=stock.ModuleSource(module),
    )
    init = fours[1].init_weight_transfer_engine
    try:
        assert engine.send_weights([0]).committed == (0,)
        fours[1].init_weight_transfer_engine = lambda init_info: 1 / 0  # type: ignore[method-assign]
        assert engine.send_weights().committed == (0,)
        assert engine.send_weights([1]).committed == (0,)  # nobody else is left
        fours[1].init_weight_transfer_engine = init  # type: ignore[method-assign]
        draw(module, 2)
        (replica,) = engine.send_weights([1]).committed
        assert replica > 1
        fours[1].assert_holds(weights(2))
    finally:
        engine.shutdown()


def test_live_consumers_of_an_unknown_fleet_are_refused() -> None:
    four = Four()
    engine = vllm_api.RdtTrainerWeightTransferEngine.trainer_init(
        vllm_api.RdtTrainerInitInfo(rank=0), client=four, source=stock.ModuleSource(model(1))
    )
    try:
        with pytest.raises(SettingsError, match="came without num_consumers"):
            engine.send_weights([0])
        assert four.engine.calls == ["init"]
    finally:
        engine.shutdown()


def test_its_settings_are_those_of_sharded_rdt() -> None:
    theirs = sharded_info(
        3, num_consumers=8, num_rdt_buffers=3, gather_lookahead=0, stall_timeout_s=7.0
    )
    info = vllm_api.RdtTrainerInitInfo.of(theirs)
    assert (info.rank, info.num_consumers, info.stall_timeout_s) == (3, 8, 7.0)
    settings = info.settings(num_producers=4, num_replicas=2)
    assert (settings.num_slots, settings.lookahead, settings.num_replicas) == (3, 0, 2)
    assert vllm_api.RdtTrainerInitInfo.of(info) is info
    for name in ShardedRDTTrainerInitInfo.__dataclass_fields__:  # none is lost without a word
        assert name in vllm_api.RdtTrainerInitInfo.__dataclass_fields__


def test_a_backend_without_a_source_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected source="):
        stock.WeightTransferTrainerFactory.trainer_init(sharded_info(0), client=Four())


# ---- clients -------------------------------------------------------------------------------------


class SignedClient(stock.HTTPVLLMWeightSyncClient):
    """Sends more than vLLM's own does, so it must be the one that is called."""


class Handle:
    """Any actor's; nothing is called."""


def converted(client: Any, **options: Any) -> list[Any]:
    return vllm_api._clients(client, vllm_api.RdtTrainerInitInfo(rank=0, **options))


def test_vllms_http_client_becomes_ours() -> None:
    (client,) = converted(stock.HTTPVLLMWeightSyncClient("http://h:1/", timeout=7), num_consumers=4)
    assert type(client) is HttpClient
    assert (client.name, client.num_workers, client._timeout_seconds) == ("http://h:1", 4, 7)
    client.close()
    (patient,) = converted(stock.HTTPVLLMWeightSyncClient("http://h:1/", timeout=None))
    assert patient._timeout_seconds == vllm_api.RdtTrainerInitInfo.stall_timeout_s
    patient.close()
    (other,) = converted(SignedClient("http://h:1/"))
    assert type(other) is FourCallsClient
    assert (other.name, other.num_workers) == ("http://h:1", 0)


def test_vllms_ray_client_becomes_ours() -> None:
    handles = [Handle(), Handle()]
    client = stock.RayVLLMWeightSyncClient(handles)
    (one,) = converted(client, num_consumers=4, stall_timeout_s=7.0)
    assert type(one) is RayClient
    assert (one._handles, one.num_workers, one._timeout_seconds) == (handles, 4, 7.0)
    each = converted(client, num_consumers=4, workers_per_replica=2)
    assert [(type(c), c._handles, c.num_workers) for c in each] == [
        (RayClient, [handle], 2) for handle in handles
    ]


def test_clients_of_ours_stay() -> None:
    ours = HttpClient("http://h:1")
    assert converted(ours) == [ours]
    ours.close()


@pytest.mark.parametrize("given", [None, [], [None], 5, [Four(), "http://h:1"]])
@pytest.mark.parametrize("num_consumers", [0, 2])
def test_what_is_no_client_is_refused(given: Any, num_consumers: int) -> None:
    with pytest.raises(SettingsError, match=r"^client is .*: expected"):
        converted(given, num_consumers=num_consumers)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"num_consumers": 3}, "for 2 deployments"),
        ({"num_consumers": 6, "workers_per_replica": 2}, "is 3 deployments, and there are"),
    ],
)
def test_counts_that_do_not_fit_are_refused(options: dict[str, int], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        converted([Four(), Four()], **options)


# ---- several ranks -------------------------------------------------------------------------------


def test_two_ranks(tmp_path: Path) -> None:
    """All that follows, one after another: a process that imports vLLM is slow to start."""
    import torch.multiprocessing as mp

    mp.spawn(_as_rank, args=(f"file://{tmp_path}/store",), nprocs=2)


def _as_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        sharded_parameters_are_exact(rank)
        a_pipelines_names_come_from_their_owners(rank)
        a_rank_that_is_not_the_groups_is_refused(rank)
        clients_that_do_not_fit_are_told_to_every_rank(rank)
    finally:
        torch.distributed.destroy_process_group()


def two_syncs(rank: int, source: Any, draw_again: Callable[[int], None], **options: Any) -> None:
    """Two deployments on rank 0; every rank gives a client, as vLLM's own engines want it."""
    fours = [Four(2), Four(1)]
    engine = stock.WeightTransferTrainerFactory.trainer_init(
        vllm_api.RdtTrainerInitInfo(rank=rank, max_chunk_bytes=256, **options),
        client=fours if rank == 0 else fours[0],
        source=source,
    )
    try:
        assert engine.is_sender == (rank == 0)
        for seed in (2, 3):
            draw_again(seed)
            assert engine.send_weights().committed == (0, 1)
            if rank == 0:
                for four in fours:
                    four.assert_holds(weights(seed))
            else:
                assert fours[0].engine.calls == []
    finally:
        engine.shutdown()


def sharded_parameters_are_exact(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    module, mesh = model(1), torch.distributed.init_device_mesh("cpu", (2,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    two_syncs(rank, stock.ModuleSource(module), lambda seed: draw(module, seed))
    if HAS_PLACEMENTS:  # each rank's own shards, as the metadata places them; uneven ones
        source = stock.ModuleSource(module)
        assert any(meta.placements for meta in source.metadata)
        no_gather(module)
        two_syncs(rank, source, lambda seed: draw(module, seed), serve_local=True)


def no_gather(module: nn.Module) -> None:
    for param in module.parameters():
        param.full_tensor = None  # whoever calls it fails


def owners_of(name: str) -> tuple[int, ...]:
    """A pipeline: its second stage holds the last two layers; the norm is on both."""
    if "norm" in name:
        return (0, 1)
    return (0,) if "layers.0" in name else (1,)


def a_pipelines_names_come_from_their_owners(rank: int) -> None:
    source = OwningSource(rank) if HAS_PLACEMENTS else HoldingSource(rank)
    two_syncs(rank, source, source.draw)


class Pipeline(stock.WeightSource):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weights = weights(1)

    def draw(self, seed: int) -> None:
        self.weights = weights(seed)


if HAS_PLACEMENTS:

    class OwningSource(Pipeline):
        @cached_property
        def metadata(self) -> list[Any]:
            return [
                stock.ParamMeta(name, t.dtype, tuple(t.shape), owners=owners_of(name))
                for name, t in self.weights.items()
            ]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name in self.owned_names(self.rank):
                yield name, self.weights[name].clone()

else:

    class HoldingSource(Pipeline):
        def metadata(self) -> list[Any]:
            return [stock.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.weights.items()]

        def held_names(self) -> list[str]:
            return [name for name in self.weights if self.rank in owners_of(name)]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            held = self.held_names()
            for name, tensor in self.weights.items():
                yield name, tensor.clone() if name in held else None


def a_rank_that_is_not_the_groups_is_refused(rank: int) -> None:
    with pytest.raises(
        SettingsError, match=rf"rank is {1 - rank}, and this process is rank {rank}"
    ):
        stock.WeightTransferTrainerFactory.trainer_init(
            sharded_info(1 - rank), client=Four(), source=stock.ModuleSource(model(1))
        )


def clients_that_do_not_fit_are_told_to_every_rank(rank: int) -> None:
    with pytest.raises(Exception, match="for 2 deployments"):
        stock.WeightTransferTrainerFactory.trainer_init(
            sharded_info(rank, num_consumers=3),
            client=[Four(), Four()],
            source=stock.ModuleSource(model(1)),
        )
