"""Shards of four gloo ranks, put together again, against the tensors that they are shards of."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from rdt_plan import Manifest, ParamMeta
from rdt_trainer import ModuleSource, NamedView, ShardedModuleSource, SourceError
from rdt_trainer.source import adapt
from rdt_trainer.testing.rank_processes import RankProcesses

NUM_RANKS = 4
MESHES = {
    "line": [0, 1, 2, 3],
    "square": [[0, 1], [2, 3]],
    "turned": [[0, 2], [1, 3]],
    "part": [1, 3],
}
REMEDY = "serve it by ModuleSource, which gathers it whole"


@dataclass(frozen=True)
class Tensor:
    """A parameter: plain without a mesh; over the columns of "square" as tensor parallelism does,
    if ``tp`` says how."""

    shape: tuple[int, ...]
    mesh: str | None = None
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    tp: Placement | None = None

    def draw(self, seed: int) -> torch.Tensor:
        """Whole; equal on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class Model:
    """Layers of one tensor each, by number; ``fsdp``: what `fully_shard` is given, "dp" being the
    rows of "square"; ``experts``: served as views, gate and up of each."""

    tensors: tuple[Tensor, ...]
    fsdp: str | None = None
    dtype: torch.dtype | None = None
    experts: bool = False
    turned: bool = False
    stable: bool = True

    def names(self, name: str) -> str | list[NamedView]:
        if not self.experts:
            return name
        return [
            NamedView(f"{name}.{e}.{half}", lambda t, e=e, half=half: self._half(t[e], half))
            for e in range(self.tensors[int(name.split(".")[1])].shape[0])
            for half in range(2)
        ]

    def _half(self, expert: torch.Tensor, half: int) -> torch.Tensor:
        part = expert.chunk(2)[half]
        return part.T if self.turned else part

    def expected(self) -> dict[str, torch.Tensor]:
        """What is served, by name, from whole tensors."""
        found = {}
        for number, tensor in enumerate(self.tensors):
            name, whole = f"layers.{number}.w", tensor.draw(number)
            served = whole if self.dtype is None else whole.to(self.dtype)
            named = self.names(name)
            views = [NamedView(named)] if isinstance(named, str) else named
            found |= {view.name: view.view(served).contiguous() for view in views}
        return found


class Rank:
    """A rank with the meshes; builds a model and says what its source serves."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.meshes = {
            name: DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")[: torch.tensor(ranks).ndim])
            for name, ranks in MESHES.items()
        }
        self.meshes |= {axis: self.meshes["square"][axis] for axis in ("dp", "tp")}

    def build(self, model: Model) -> nn.Module:
        layers = nn.ModuleList()
        for number, tensor in enumerate(model.tensors):
            whole = tensor.draw(number)
            if tensor.tp is not None:
                whole = self._spread(whole, "tp", [tensor.tp])
            elif tensor.mesh is not None:
                whole = self._spread(whole, tensor.mesh, tensor.placements)
            layer = nn.Module()
            layer.w = nn.Parameter(whole, requires_grad=not tensor.frozen)
            layers.append(layer)
        found = nn.Module()
        found.layers = layers
        if model.fsdp is not None:
            for layer in layers:
                fully_shard(layer, mesh=self.meshes[model.fsdp])
        return found

    def _spread(
        self, whole: torch.Tensor, mesh: str, placements: Sequence[Placement]
    ) -> torch.Tensor:
        return distribute_tensor(whole, self.meshes[mesh], placements, src_data_rank=None)

    def source(self, model: Model) -> tuple[nn.Module, ShardedModuleSource]:
        module = self.build(model)
        names = model.names if model.experts else None
        return module, ShardedModuleSource(
            module, names=names, dtype=model.dtype, stable=model.stable
        )

    def serve(self, model: Model) -> tuple[tuple[ParamMeta, ...], dict[str, torch.Tensor]] | str:
        """What is declared, and this rank's pieces; or why not."""
        _, source = self.source(model)
        try:
            adapted = adapt(source, rank=self.rank, num_producers=NUM_RANKS)
        except SourceError as error:
            return str(error)
        assert (adapted.stable == {}) or adapted.passes is source
        source.fill_stable_tensors()
        pieces = {name: tensor.clone() for name, tensor in source.stable_tensors().items()}
        passed = {name: tensor.clone() for name, tensor in source.iter_local()}
        assert [n for n, t in passed.items() if t.numel()] == [
            n for n in passed if n in pieces
        ] or (not model.stable)
        for name, piece in pieces.items():
            assert bits(piece) == bits(passed[name]), name
        return adapted.params, passed

    def full_tensors(self, model: Model) -> list[torch.Tensor | None]:
        """What torch gathers of each; None of plain ones, and of those that are elsewhere."""
        found = []
        for parameter in [layer.w for layer in self.build(model).layers]:
            is_here = isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate()
            found.append(parameter.detach().full_tensor() if is_here else None)
        return found

    def sources_of(self, model: Model, steps: int) -> list[tuple[dict, dict, int]]:
        """Addresses of the stable tensors and their contents, after each of some steps, and how
        many storages they are in."""
        module, source = self.source(model)
        _ = source.metadata
        found = []
        for _ in range(steps):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2)
            stable = source.stable_tensors()
            source.fill_stable_tensors()
            storages = {tensor.untyped_storage().data_ptr() for tensor in stable.values()}
            addresses = {name: tensor.data_ptr() for name, tensor in stable.items()}
            values = {name: tensor.clone() for name, tensor in stable.items()}
            found.append((addresses, values, len(storages)))
        return found

    def metas_after_forward(self, model: Model) -> tuple[list, list, bool]:
        """Of both sources, with the outermost gathered by a forward pass; are they shards?"""
        module = self.build(replace(model, fsdp=None))
        fully_shard(module, mesh=self.meshes["line"])
        module.forward = lambda: sum(layer.w.sum() for layer in module.layers)
        with torch.no_grad():
            module()
        assert not isinstance(module.layers[0].w, DTensor)
        sharded, whole = ShardedModuleSource(module), ModuleSource(module)
        metas = [meta.placements for meta in sharded.metadata], [m.owners for m in whole.metadata]
        assert whole.stable_tensors() == {}
        before = {name: t.clone() for name, t in sharded.stable_tensors().items()}
        with torch.no_grad():
            module()
        after = sharded.stable_tensors()
        same = before.keys() == after.keys() and all(before[n].equal(after[n]) for n in before)
        return *metas, same

    def refusal_of_a_partial(self) -> str:
        module = nn.Module()
        local = DTensor.from_local(torch.ones(4), self.meshes["line"], [Partial()])
        module.w = nn.Parameter(local)
        return self._refusal(module)

    def refusal_of_unsorted_ranks(self) -> str:
        """`fully_shard` cuts by the place in the sorted group, `distribute_tensor` by the mesh."""
        module = nn.Module()
        mesh = DeviceMesh("cpu", [3, 1, 0, 2])
        module.w = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)]))
        return self._refusal(module)

    def refusal_of_another_cut(self) -> str:
        """Rows 1, 1, 1, 2: legal for torch, and not what its placement says."""
        module = nn.Module()
        local = torch.ones(2 if self.rank == 3 else 1, 3)
        mesh = self.meshes["line"]
        cut = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
        module.w = nn.Parameter(cut)
        return self._refusal(module)

    def _refusal(self, module: nn.Module) -> str:
        try:
            _ = ShardedModuleSource(module).metadata
        except SourceError as error:
            return str(error)
        return ""

    def replaced(self, model: Model) -> bool:
        """Whether a local tensor that moved is other stable tensors."""
        module, source = self.source(model)
        _ = source.metadata
        before = source.stable_tensors()
        assert source.stable_tensors() is before
        parameter = module.layers[0].w
        parameter._local_tensor = parameter._local_tensor.clone()
        after = source.stable_tensors()
        name = "layers.0.w"
        return after is not before and after[name].data_ptr() == parameter._local_tensor.data_ptr()


@contextmanager
def rank_of(rank: int) -> Generator[Rank]:
    yield Rank(rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Generator[RankProcesses]:
    with RankProcesses(rank_of, NUM_RANKS, tmp_path_factory.mktemp("ranks") / "store") as ranks:
        yield ranks


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def together(
    answers: Sequence[tuple[tuple[ParamMeta, ...], Mapping[str, torch.Tensor]]],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Each rank's piece is what its box of the whole is, and the boxes are all of it."""
    params = answers[0][0]
    assert all(found == params for found, _ in answers)  # all ranks declare the same
    manifest = Manifest.build(params)
    assert {param.name for param in params} == expected.keys()
    for param in manifest.params:
        whole = expected[param.name]
        assert (param.shape, f"torch.{param.dtype}") == (tuple(whole.shape), str(whole.dtype))
        covered = torch.zeros(param.shape, dtype=torch.int64)
        for rank, (_, pieces) in enumerate(answers):
            box = param.box(rank)
            if box is None:
                assert param.name not in pieces or not pieces[param.name].numel()
                continue
            index = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert bits(pieces[param.name]) == bits(whole[index]), (param.name, rank)
            assert tuple(pieces[param.name].shape) == box.shape
            covered[index] += 1
        assert covered.min() == covered.max() if covered.numel() else True
        assert not covered.numel() or covered.min() > 0


EXTENTS = st.integers(1, 9)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Tensor:
    shape = shape or tuple(draw(st.lists(EXTENTS, min_size=0, max_size=3)))
    mesh = draw(st.sampled_from([None, *MESHES]))
    placement = st.just(Replicate())
    if shape:
        placement = st.one_of(placement, st.integers(0, len(shape) - 1).map(Shard))
    num_axes = 0 if mesh is None else torch.tensor(MESHES[mesh]).ndim
    placements = tuple(draw(placement) for _ in range(num_axes))
    return Tensor(shape, mesh, placements, draw(DTYPES), draw(st.booleans()))


@settings(max_examples=40)
@given(
    model=st.builds(
        Model,
        st.lists(tensors(), min_size=1, max_size=4).map(tuple),
        dtype=st.sampled_from([None, torch.bfloat16]),
        stable=st.booleans(),
    )
)
def test_pieces_are_what_torch_distributes(ranks: RankProcesses, model: Model) -> None:
    together(ranks.ask("serve", model), model.expected())
    for found in ranks.ask("full_tensors", model):
        for number, whole in enumerate(found):
            assert whole is None or bits(whole) == bits(model.tensors[number].draw(number))


@st.composite
def tp_tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(EXTENTS, min_size=1, max_size=2)))
    dims = st.integers(0, len(shape) - 1).map(Shard)
    return Tensor(shape, tp=draw(st.one_of(st.none(), st.just(Replicate()), dims)))


@settings(max_examples=40)
@given(
    rows=st.lists(st.lists(EXTENTS, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3),
    mesh=st.sampled_from(["line", "square", "turned"]),
    dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_fsdp2_alone_and_hybrid(ranks: RankProcesses, rows: list, mesh: str, dtype) -> None:
    model = Model(tuple(map(Tensor, rows)), fsdp=mesh, dtype=dtype)
    together(ranks.ask("serve", model), model.expected())


@settings(max_examples=40)
@given(tensor=tp_tensors())
def test_fsdp2_beside_tensor_parallelism(ranks: RankProcesses, tensor: Tensor) -> None:
    """Exact, or refused where torch's placements say other than what FSDP2 holds."""
    model = Model((tensor,), fsdp="dp")
    answers = ranks.ask("serve", model)
    if isinstance(answers[0], str):
        assert tensor.tp == Shard(0) and tensor.shape[0] % 4
        assert len(set(answers)) == 1
        assert answers[0].startswith("layers.0.w: expected strided shards that cut")
        assert REMEDY in answers[0]
        return
    together(answers, model.expected())


@pytest.mark.parametrize(
    ("tensor", "mesh", "placements"),
    [
        (Tensor((8, 3), tp=Shard(0)), (2, 2), ("shard(0,2)", "shard(0)")),
        (Tensor((8, 3), tp=Shard(1)), (2, 2), ("shard(0)", "shard(1)")),
        (Tensor((5, 3), tp=Replicate()), (2, 2), ("shard(0)", "replicate")),
        (Tensor((5,)), (2, 2), ("replicate", "shard(0)")),  # two rows of the mesh hold the same
    ],
)
def test_fsdp2_beside_tensor_parallelism_is_one_mesh(ranks, tensor, mesh, placements) -> None:
    (meta,), _ = ranks.ask("serve", Model((tensor,), fsdp="dp"))[0]
    assert (meta.mesh_shape, meta.placements) == (mesh, placements)
    assert meta.owners == ((0, 2, 1, 3) if tensor.tp is None else (0, 1, 2, 3))


def test_what_no_plan_can_express_is_refused_by_name(ranks: RankProcesses) -> None:
    for answer in ranks.ask("refusal_of_a_partial"):
        assert answer.startswith("w is placed by Partial(") and REMEDY in answer
    for answer in ranks.ask("refusal_of_unsorted_ranks"):
        assert answer.startswith("w is on the mesh [3, 1, 0, 2]: expected ranks that ascend")
    answers = ranks.ask("refusal_of_another_cut")
    assert any(text.startswith("w: rank 3 has [2, 3] of [5, 3]") for text in answers)
    assert all(REMEDY in text for text in answers if text)


# ---- where pieces are ---------------------------------------------------------------------------


def test_masters_are_cast_into_one_area_that_stays(ranks: RankProcesses) -> None:
    shapes = [(5, 3), (7,), (2, 2)]
    masters = Model(tuple(map(Tensor, shapes)), fsdp="line", dtype=torch.bfloat16)
    for rank, (first, second) in enumerate(ranks.ask("sources_of", masters, 2)):
        (addresses, values, num_storages), (later, doubled, _) = first, second
        assert addresses == later and num_storages == (1 if values else 0), rank
        assert all(doubled[name].equal(2 * values[name]) for name in values)
        assert all(address % 256 == min(addresses.values()) % 256 for address in later.values())


def test_what_is_served_as_it_is_needs_no_area(ranks: RankProcesses) -> None:
    model = Model((Tensor((5, 3)), Tensor((6,), dtype=torch.bfloat16)), fsdp="line")
    for (addresses, values, num), (later, doubled, _) in ranks.ask("sources_of", model, 2):
        assert addresses == later and num == len(values)
        assert all(doubled[name].equal(2 * values[name]) for name in values)


def test_shards_are_served_though_a_forward_pass_left_parameters_gathered(ranks) -> None:
    model = Model((Tensor((5, 3)), Tensor((8,))))
    for placements, owners, same in ranks.ask("metas_after_forward", model):
        assert [str(axis) for (axis,) in placements] == ["shard(0)"] * 2
        assert owners == [(0, 1, 2, 3)] * 2
        assert same


def test_a_local_tensor_that_moves_is_noticed(ranks: RankProcesses) -> None:
    assert all(ranks.ask("replaced", Model((Tensor((8, 2)),), fsdp="line")))


# ---- views ---------------------------------------------------------------------------------------

EXPERTS = (6, 4, 5)  # fused: gate above up


@settings(max_examples=40)
@given(
    tensor=tensors(EXPERTS),
    turned=st.booleans(),
    dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_views_of_shards(ranks: RankProcesses, tensor: Tensor, turned: bool, dtype) -> None:
    model = Model((tensor,), experts=True, turned=turned, dtype=dtype)
    answers = ranks.ask("serve", model)
    if isinstance(answers[0], str):
        assert Shard(1) in tensor.placements  # gate and up of each expert, in pieces
        assert len(set(answers)) == 1
        assert "is a view of layers.0.w [6, 4, 5], whose dim 1" in answers[0]
        assert REMEDY in answers[0]
        return
    together(answers, model.expected())


@pytest.mark.parametrize(
    ("mesh", "placements", "owners", "mesh_shape", "cut"),
    [
        ("line", (Shard(0),), (1,), (), ()),  # a whole expert on one rank
        ("line", (Shard(2),), (0, 1, 2, 3), (4,), ("shard(1)",)),
        ("turned", (Shard(0), Shard(2)), (0, 2), (2,), ("shard(1)",)),
        ("turned", (Replicate(), Shard(0)), (0, 1), (), ()),
        ("turned", (Shard(2), Shard(2)), (0, 2, 1, 3), (2, 2), ("shard(1)", "shard(1)")),
        ("part", (Shard(1),), (1,), (), ()),  # gate on one rank, up on the other
    ],
)
def test_a_view_is_spread_as_far_as_it_is_cut(
    ranks, mesh, placements, owners, mesh_shape, cut
) -> None:
    model = Model((Tensor(EXPERTS, mesh, placements),), experts=True)
    params, _ = ranks.ask("serve", model)[0]
    meta = next(param for param in params if param.name == "layers.0.w.2.0")
    assert (meta.owners, meta.mesh_shape, meta.placements) == (owners, mesh_shape, cut)


# ---- the staging area ---------------------------------------------------------------------------


class Masters(nn.Module):
    """Served as bf16: two that are staged, and one that is as it is served."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(2))
        self.small = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def longer_cache(module: Masters) -> None:
    module.cache = torch.zeros(7)


def other_master(module: Masters) -> None:
    module.layers[0].weight = nn.Parameter(torch.randn(2, 3))


@pytest.mark.parametrize("change", [longer_cache, other_master])
def test_the_staging_area_stays_while_the_module_has_other_tensors(change):
    module = Masters()
    source = ShardedModuleSource(module, dtype=torch.bfloat16)
    assert len(source.metadata) == 3
    stable = source.stable_tensors()
    source.fill_stable_tensors()
    change(module)
    module.layers[1].weight.data.mul_(2)
    source.fill_stable_tensors()
    found = source.stable_tensors()
    assert found is not stable
    for name, parameter in module.named_parameters():
        assert found[name].data_ptr() == stable[name].data_ptr()
        assert torch.equal(stable[name], parameter.to(torch.bfloat16))
    assert list(source.iter_rest(found.keys())) == []


def test_masters_under_other_names_are_served_under_those():
    module = Masters()
    source = ShardedModuleSource(module, dtype=torch.bfloat16)
    assert len(source.metadata) == 3
    stable = source.stable_tensors()
    first, second = module.layers._modules.values()
    module.layers._modules.clear()
    module.layers._modules.update({"1": first, "0": second})
    source.fill_stable_tensors()
    assert source.stable_tensors().keys() == stable.keys()
    for name, master in (("layers.0.weight", second.weight), ("layers.1.weight", first.weight)):
        assert torch.equal(stable[name], master.detach().to(torch.bfloat16))  # in the same area
    assert list(source.iter_rest(stable.keys())) == []
