from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed.tensor

from rdt_plan import AxisPlacement
from rdt_plan.manifest import ParamMeta
from rdt_trainer.errors import RankFailedError, SourceError
from rdt_trainer.source import LocalWeightSource, SourceMeta, adapt

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


@dataclass(frozen=True)
class ForeignMeta:
    """The fields of vLLM's own ParamMeta."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class NewerSource:
    """In the shape of 0.33: metadata is a property, and every mode is declared."""

    def __init__(self, owners: tuple[int, ...] | None = None, full: bool = True) -> None:
        self._owners, self._full = owners, full

    @cached_property
    def metadata(self):
        return [
            ForeignMeta("a", A.dtype, tuple(A.shape), self._owners),
            ForeignMeta("b", B.dtype, tuple(B.shape)),
        ]

    def implements_iter_full(self):
        return self._full

    def iter_full(self):
        yield from (("a", A), ("b", B))

    def iter_local(self):
        yield from (("a", A), ("b", B))


class StandingSource(NewerSource):
    """All of it is stable: nothing is left for a pass."""

    def stable_tensors(self):
        return {"a": A, "b": B}

    def iter_rest(self, stable):
        return iter(())


class OverridingSource(StandingSource):
    """What it does in its passes must be done."""

    def iter_full(self):
        yield from (("a", A), ("b", B))


class OverridingBothSource(OverridingSource):
    def iter_rest(self, stable):
        return iter(())


class OlderSource:
    """In the shape of 0.32: metadata is a method, held_names speaks of one rank."""

    def __init__(self, held: set[str] | None = None) -> None:
        self._held = held

    def metadata(self):
        return [ForeignMeta("a", A.dtype, tuple(A.shape)), ForeignMeta("b", B.dtype, (4,))]

    def held_names(self):
        return self._held

    def __iter__(self):
        for name, tensor in (("a", A), ("b", B)):
            yield name, tensor if self._held is None or name in self._held else None


@pytest.mark.parametrize(
    ("kind", "is_left_out"),
    [(StandingSource, True), (OverridingSource, False), (OverridingBothSource, True)],
)
def test_stable_tensors_are_left_out_of_passes_that_are_not_overridden(kind, is_left_out):
    source = kind()
    adapted = adapt(source)
    assert adapted.passes is (source if is_left_out else None)
    assert adapted.stable.keys() == {"a", "b"}


@pytest.mark.parametrize("source", [NewerSource(), OlderSource()])
def test_both_shapes_are_understood(source):
    adapted = adapt(source)
    assert adapted.params == (
        ParamMeta("a", "float32", (2, 3), (0,)),
        ParamMeta("b", "bfloat16", (4,), (0,)),
    )
    for _ in range(2):  # every pass is a fresh one
        assert [(n, t.data_ptr()) for n, t in adapted.new_pass()] == [
            ("a", A.data_ptr()),
            ("b", B.data_ptr()),
        ]


def test_own_metadata_is_understood():
    class Source:
        metadata = (SourceMeta("a", torch.float32, (2, 3)), ParamMeta("b", "bfloat16", (4,), (1,)))

        def iter_full(self):
            yield "a", A

    assert [p.owners for p in adapt(Source(), num_producers=2).params] == [(0, 1), (1,)]


def test_unspecified_owners_are_every_rank_and_given_ones_are_sorted():
    params = adapt(NewerSource(owners=(2, 0)), num_producers=3).params
    assert [p.owners for p in params] == [(0, 2), (0, 1, 2)]


def test_owner_outside_the_job_is_refused():
    with pytest.raises(SourceError, match=r"a: owners \(2, 0\).*2 producers.*num_producers"):
        adapt(NewerSource(owners=(2, 0)), num_producers=2)


# ---- local pieces --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """vLLM's own, and so is `Replicate`; torch's have these names too."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    pass


class Pieces:
    """In the shape of 0.33, local only: ``a`` in columns over two of three ranks."""

    def __init__(self, *placements: Any, mesh_shape: tuple[int, ...] | None = None) -> None:
        self._layout = (2, 0), mesh_shape, placements or None

    @property
    def metadata(self):
        return [
            ForeignMeta("a", A.dtype, tuple(A.shape), *self._layout),
            ForeignMeta("b", B.dtype, (4,)),
        ]

    def implements_iter_full(self):
        return False

    def iter_full(self):
        raise NotImplementedError

    def implements_iter_local(self):
        return True

    def iter_local(self):
        yield from (("a", A[:, :2]), ("b", B))


@pytest.mark.parametrize(
    ("source", "mesh"),
    [
        (Pieces(Shard(1)), ((2, 0), (2,), ("shard(1)",))),
        (Pieces(Shard(1), mesh_shape=(2,)), ((2, 0), (2,), ("shard(1)",))),
        (
            Pieces(Replicate(), AxisPlacement(0), mesh_shape=(1, 2)),
            ((2, 0), (1, 2), ("replicate", "shard(0)")),
        ),
        (
            Pieces("shard(0,2)", "shard(0)", mesh_shape=(1, 2)),
            ((2, 0), (1, 2), ("shard(0,2)", "shard(0)")),
        ),
        (Pieces(torch.distributed.tensor.Shard(-1)), ((2, 0), (2,), ("shard(1)",))),
        (
            Pieces(
                torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2),
                torch.distributed.tensor.Shard(0),
                mesh_shape=(1, 2),
            ),
            ((2, 0), (1, 2), ("shard(0,2)", "shard(0)")),
        ),
        (Pieces(Replicate()), ((0, 2), (), ())),
        (Pieces(mesh_shape=(2,)), ((0, 2), (), ())),
    ],
)
def test_pieces_keep_the_mesh_that_cuts_them_and_its_order(source, mesh):
    local: LocalWeightSource = source
    adapted = adapt(local, num_producers=3)
    assert adapted.params == (
        ParamMeta("a", "float32", (2, 3), *mesh),
        ParamMeta("b", "bfloat16", (4,), (0, 1, 2)),
    )
    assert [name for name, _ in adapted.new_pass()] == ["a", "b"]


@pytest.mark.parametrize("placement", [Partial(), torch.distributed.tensor.Partial()])
def test_a_placement_that_holds_no_piece_is_refused_by_name(placement):
    with pytest.raises(SourceError, match=r"a is placed by .*Partial.*expected each axis .* shard"):
        adapt(Pieces(placement), num_producers=3)


def test_of_a_source_with_both_modes_whole_tensors_are_served():
    """A class that overrides only iter_full means it, and so do those written for sharded_rdt."""
    adapted = adapt(NewerSource(owners=(0, 2)), num_producers=3)
    assert adapted.params[0].mesh_shape == ()
    assert dict(adapted.new_pass())["a"].shape == A.shape


def test_a_source_without_either_mode_is_refused_with_the_remedy():
    class Described:
        metadata = (SourceMeta("a", torch.float32, (2, 3)),)

    for source in (Described(), NewerSource(full=False)):
        source.implements_iter_local = lambda: False
        with pytest.raises(SourceError, match=r"implements neither iter_full nor iter_local.*wrap"):
            adapt(source)


def test_stable_pieces_are_of_names_that_this_rank_holds():
    class Stable(Pieces):
        def stable_tensors(self):
            return {"a": A[:, 2:].contiguous()}

    assert adapt(Stable(Shard(1)), rank=0, num_producers=3).stable.keys() == {"a"}
    with pytest.raises(SourceError, match=r"has a, of which this rank holds nothing"):
        adapt(Stable(Shard(1)), rank=1, num_producers=3)


def test_module_instead_of_a_source_is_refused_with_the_remedy():
    with pytest.raises(SourceError, match=r"Linear has no metadata.*ModuleSource"):
        adapt(torch.nn.Linear(2, 2))


def test_empty_source_is_refused():
    class Empty(OlderSource):
        def metadata(self):
            return []

    with pytest.raises(SourceError, match=r"Empty\.metadata is empty"):
        adapt(Empty())


def test_held_names_of_all_ranks_become_owners_and_unheld_names_are_skipped():
    sent = []

    def exchange(mine):
        sent.append(mine)
        return [["a", "b"], mine]

    adapted = adapt(OlderSource({"b"}), rank=1, num_producers=2, exchange=exchange)
    assert sent == [["b"]]
    assert [(p.name, p.owners) for p in adapted.params] == [("a", (0,)), ("b", (0, 1))]
    assert [name for name, _ in adapted.new_pass()] == ["b"]


def test_name_that_nobody_holds_is_refused():
    with pytest.raises(SourceError, match=r"a: no producer holds it: .* owner of 2; declare its"):
        adapt(OlderSource({"b"}), rank=1, num_producers=2, exchange=lambda mine: [mine, mine])


def test_exchange_of_the_wrong_size_is_refused():
    with pytest.raises(SourceError, match="returned 1 ranks: expected 2"):
        adapt(OlderSource({"b"}), rank=1, num_producers=2, exchange=lambda mine: [mine])


def test_held_names_need_an_exchange():
    with pytest.raises(SourceError, match=r"rank 1: held_names.*not initialised: pass exchange="):
        adapt(OlderSource({"b"}), rank=1, num_producers=2)


def test_held_names_travel_over_torch_distributed(tmp_path):
    """Two processes, each holding one name, learn what the other holds."""
    import torch.multiprocessing as mp

    mp.spawn(_adapt_as_rank, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    for rank in range(2):
        owners = (tmp_path / f"rank{rank}").read_text()
        assert owners == "[('a', (0,)), ('b', (1,))]"


def _adapt_as_rank(rank: int, init_method: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    try:
        adapted = adapt(OlderSource({"ab"[rank]}), rank=rank, num_producers=2)
        with open(f"{folder}/rank{rank}", "w") as file:
            file.write(str([(p.name, p.owners) for p in adapted.params]))
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_cannot_describe_its_source_does_not_keep_the_others_waiting(tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_fail_to_adapt_on_rank_1, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    assert (tmp_path / "rank0").read_text() == (
        "RankFailedError: trainer rank 1 failed while the job was opened: "
        "ZeroDivisionError: no shapes"
    )
    assert (tmp_path / "rank1").read_text() == "ZeroDivisionError: no shapes"


class Indescribable(OlderSource):
    def metadata(self):
        raise ZeroDivisionError("no shapes")


def _fail_to_adapt_on_rank_1(rank: int, init_method: str, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    source = Indescribable() if rank else OlderSource()
    try:
        adapt(source, rank=rank, num_producers=2)
    except (RankFailedError, ZeroDivisionError) as error:
        with open(f"{folder}/rank{rank}", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
    finally:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
