"""The whole model's metadata, from ranks that know only what they hold."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_plan import AxisPlacement, Manifest, ParamMeta
from rdt_plan.groups import group_key
from rdt_trainer import (
    HeldPart,
    JobSettings,
    ModuleSource,
    RankFailedError,
    RdtTrainer,
    ShardedModuleSource,
    SourceError,
    SourceMeta,
    merged_metadata,
)
from rdt_trainer.source import adapt
from rdt_trainer.testing import TorchEngineClient
from rdt_trainer.testing.rank_processes import RankProcesses
from rdt_transport.wire.nixl import NixlWire

F32 = torch.float32


@st.composite
def models(draw: st.DrawFn) -> list[ParamMeta]:
    """Layers on any ranks; each name whole, or cut along one dim, in one copy or several."""
    num_ranks = draw(st.integers(1, 6))
    params = []
    for index in range(draw(st.integers(1, 6))):
        ranks = draw(st.permutations(range(num_ranks)))
        shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
        name = f"layers.{draw(st.integers(0, 2))}.{index}"
        copies = draw(st.integers(1, num_ranks))
        count = draw(st.integers(1, num_ranks // copies))
        owners = [sorted(ranks[part::count][:copies]) for part in range(count)]
        if draw(st.booleans()):
            whole = tuple(sorted(ranks[: copies * count]))
            params.append(ParamMeta(name, "float32", shape, whole))
        else:
            rows = tuple(rank for row in zip(*owners, strict=True) for rank in row)
            axes = ("replicate", f"shard({draw(st.integers(0, 1))})")
            params.append(ParamMeta(name, "float32", shape, rows, (copies, count), axes))
    return params


def held(param: ParamMeta, rank: int) -> HeldPart | SourceMeta | None:
    if rank not in param.owners:
        return None
    if not param.mesh_shape:
        return SourceMeta(param.name, F32, param.shape)
    dim, (_, count) = int(param.placements[1][-2]), param.mesh_shape
    box = param.box(rank)
    shape = list(param.shape)
    shape[dim] = 0 if box is None else box.shape[dim]
    return HeldPart(param.name, F32, tuple(shape), dim, param.owners.index(rank) % count, count)


@given(models())
def test_ranks_parts_make_the_whole(params: list[ParamMeta]) -> None:
    ranks = range(1 + max(rank for param in params for rank in param.owners))
    everyone = [[part for p in params if (part := held(p, rank)) is not None] for rank in ranks]
    found = merged_metadata(everyone[0], exchange=lambda mine: everyone)
    assert {meta.name: meta for meta in found} == {
        p.name: SourceMeta(
            p.name,
            F32,
            p.shape,
            p.owners,
            p.mesh_shape,
            tuple(map(AxisPlacement.parse, p.placements)),
        )
        for p in params
    }
    groups = [group_key(meta.name) for meta in found]
    assert sum(a != b for a, b in pairwise(groups)) == len(set(groups)) - 1


def test_without_a_group_this_rank_is_alone() -> None:
    meta = SourceMeta("a.w", F32, (2,))
    assert merged_metadata([meta]) == [SourceMeta("a.w", F32, (2,), (0,))]


WHOLE = SourceMeta("a.w", F32, (4, 2))
CUT = HeldPart("a.w", F32, (2, 2), 0, 0, 2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [[WHOLE], [], [SourceMeta("a.w", F32, (4, 3))]],
            r"a\.w is float32\[4, 3\] on rank 2, and float32\[4, 2\] on rank 0: expected ranks to",
        ),
        ([[WHOLE], [SourceMeta("a.w", torch.bfloat16, (4, 2))]], r"bfloat16\[4, 2\] on rank 1"),
        ([[WHOLE], [CUT]], r"\[2, 2\], part 0 of 2 along dim 0 on rank 1, and float32\[4, 2\] on"),
        ([[CUT], [HeldPart("a.w", F32, (2, 3), 0, 1, 2)]], "part 1 of 2 along dim 0 on rank 1"),
        ([[CUT], [HeldPart("a.w", F32, (2, 2), 1, 1, 2)]], "along dim 1 on rank 1"),
        ([[CUT], [HeldPart("a.w", F32, (2, 2), 0, 1, 3)]], "part 1 of 3"),
        ([[CUT], [CUT]], r"hold the parts \{0: 0, 1: 0\}: expected each part on equally many"),
        ([[CUT], []], r"cut in 2 along dim 0, and ranks hold the parts \{0: 0\}"),
        ([[CUT], [HeldPart("a.w", F32, (2, 2), 0, 2, 2)]], r"\{0: 0, 1: 2\}"),
        (
            [[CUT], [HeldPart("a.w", F32, (4, 2), 0, 1, 2)]],
            "part 0 of 2 along dim 0 on rank 0: expected 3 along that dim, as torch.chunk cuts 6",
        ),
        (
            [[SourceMeta("a.w", F32, (4,), (0, 1))], [SourceMeta("a.w", F32, (4,), (1,))]],
            r"of ranks \[1\] on rank 1, and float32\[4\] of ranks \[0, 1\] on rank 0",
        ),
        ([[], [WHOLE, WHOLE]], r"rank 1 names a\.w twice"),
    ],
)
def test_ranks_that_disagree_are_named(
    ranks: list[list[HeldPart | SourceMeta]], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        merged_metadata(ranks[0], exchange=lambda mine: ranks)


# ---- real ranks ----------------------------------------------------------------------------------


class Stage(nn.Module):
    """Layers 0 and 1, or 2 and 3."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(first + i): nn.Linear(6, 7) for i in range(2)})


class StageSource:
    """What a rank of a pipeline writes: a module of its own, whole or cut by FSDP2."""

    def __init__(self, local: Any) -> None:
        self._local = local
        self.stable_tensors = local.stable_tensors

    @cached_property
    def metadata(self) -> list[SourceMeta]:
        return merged_metadata(self._local.metadata)


class WholeStage(StageSource):
    def iter_full(self) -> Any:
        return self._local.iter_full()


class CutStage(StageSource):
    def iter_local(self) -> Any:
        return self._local.iter_local()


class StageRank:
    """One of four ranks: two stages of two."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _stage(self, seed: int) -> Stage:
        torch.manual_seed(seed)
        stages = Stage(0), Stage(2)
        return stages[self.rank // 2]

    def sync(self, is_cut: bool) -> tuple[int, list[dict[str, Tensor]]]:
        """The bytes that the workers read where they lie, and what they then hold."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module = self._stage(seed=1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
        source: Any = WholeStage(ModuleSource(module))
        if is_cut:
            fully_shard(module, mesh=mesh["shard"])
            source = CutStage(ShardedModuleSource(module))
        engine = TorchEngineClient(NixlWire, num_workers=2, timeout_seconds=60)
        client = engine if self.rank == 0 else None
        with RdtTrainer(source, client, rank=self.rank, settings=JobSettings(4)) as trainer:
            trainer.init()
            report = trainer.send_weights()
            held = [{n: t.clone() for n, t in worker.items()} for worker in engine.workers]
            return report.bytes_direct, held if client is not None else []

    def expected(self, worker: int) -> dict[str, Tensor]:
        engine = TorchEngineClient(NixlWire, num_workers=2)
        named = {n: p.detach() for n, p in self._stage(seed=1).named_parameters()}
        return {n: engine.shard(worker, t).contiguous() for n, t in named.items()}

    def fail(self) -> str:
        def raising() -> Generator[SourceMeta]:
            yield SourceMeta("a.w", F32, (1,))
            if self.rank == 2:
                raise ValueError("no such layer")

        with pytest.raises(ValueError if self.rank == 2 else RankFailedError) as caught:
            merged_metadata(raising())
        return str(caught.value)


@contextmanager
def stage_rank(rank: int) -> Generator[StageRank]:
    yield StageRank(rank)


def test_stages_of_a_pipeline_are_served_whole_and_cut(tmp_path: Path) -> None:
    with RankProcesses(stage_rank, 4, tmp_path / "store") as ranks:
        expected = [
            {n: t for each in ranks.ask("expected", worker) for n, t in each.items()}
            for worker in range(2)
        ]
        for is_cut in (False, True):
            direct, (held, *_) = zip(*ranks.ask("sync", is_cut), strict=True)
            assert all(direct), "each rank serves a part"
            for found, wanted in zip(held, expected, strict=True):
                assert found.keys() == wanted.keys() and len(wanted) == 8
                for name, tensor in wanted.items():
                    assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        said = ranks.ask("fail")
        assert said[2] == "no such layer"
        assert all("rank 2" in each and "no such layer" in each for each in said[:2] + said[3:])


def test_what_is_merged_is_a_manifest() -> None:
    """Parts that are cut are taken by `adapt` as they are."""
    ranks = [[HeldPart("a.w", F32, (2, 2), 0, index, 2)] for index in range(2)]

    class Source:
        metadata = merged_metadata(ranks[0], exchange=lambda mine: ranks)

        def iter_local(self) -> Any:
            return iter(())

    manifest = Manifest(adapt(Source(), num_producers=2).params)
    (param,) = manifest.params
    assert param.box(1) is not None and param.box(1).start == (2, 0)
