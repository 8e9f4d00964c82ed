import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close

from rdt_plan.manifest import Manifest
from rdt_trainer.errors import SourceError
from rdt_trainer.module_source import ModuleSource
from rdt_trainer.sharded_source import ShardedModuleSource
from rdt_trainer.source import adapt


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


class Model(nn.Module):
    """Registers its head first, so registration order is not group order."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(
        actual.contiguous().view(torch.uint8), expected.detach().contiguous().view(torch.uint8)
    )


def names(source: ModuleSource) -> list[str]:
    return [meta.name for meta in source.metadata]


def test_every_pass_yields_what_metadata_declares_bit_for_bit():
    model = Model()
    model.norm.weight.requires_grad_(False)  # frozen: still part of the model
    source = ModuleSource(model)
    parameters = dict(model.named_parameters())
    for _ in range(2):
        yielded = list(source.iter_full())
        assert [name for name, _ in yielded] == names(source)
        assert set(names(source)) == set(parameters)
        for meta, (name, tensor) in zip(source.metadata, yielded, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
            assert not tensor.requires_grad
            exact(tensor, parameters[name])


def test_order_keeps_gather_groups_together():
    class Interleaved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
            self.norm = nn.LayerNorm(2)
            self.down = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    source = ModuleSource(Interleaved())
    assert names(source) == [
        "up.0.weight",
        "up.1.weight",
        "down.0.weight",
        "down.1.weight",
        "norm.weight",
        "norm.bias",
    ]
    Manifest.build(adapt(source).params)


def test_a_parameter_without_copies_is_served_from_its_own_memory():
    model = Model()
    yielded = dict(ModuleSource(model).iter_full())
    assert yielded["embed.weight"].data_ptr() == model.embed.weight.data_ptr()


def test_stable_tensors_are_what_every_pass_yields_from_the_parameters_own_memory():
    model = nn.Module()
    model.plain = nn.Linear(3, 2)
    model.small = nn.Linear(3, 2, dtype=torch.bfloat16)
    model.turned = nn.Parameter(torch.empty(4, 3).t())
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    source = ModuleSource(model, dtype=torch.bfloat16, persistent_buffers=True)
    stable = source.stable_tensors()
    assert stable.keys() == {"small.weight", "small.bias", "count"}  # others are cast or copied
    for _ in range(2):
        for name, tensor in source.iter_full():
            if name in stable:
                assert tensor.data_ptr() == stable[name].data_ptr()
                assert torch.equal(tensor, stable[name]) and not stable[name].requires_grad
        with torch.no_grad():
            model.small.weight.add_(1)
    assert ModuleSource(model, stable=False).stable_tensors() == {}
    assert ModuleSource(model).stable_tensors().keys() == {
        f"{part}.{name}" for part in ("plain", "small") for name in ("weight", "bias")
    }


def test_a_pass_may_leave_the_stable_tensors_out():
    model = nn.Module()
    model.plain, model.small = nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.bfloat16)
    source = ModuleSource(model, dtype=torch.bfloat16)
    stable = source.stable_tensors()
    with torch.no_grad():
        model.small.weight.add_(1)
    assert source.stable_tensors() is stable  # contents may change
    assert [name for name, _ in source.iter_rest(stable.keys())] == ["plain.weight", "plain.bias"]
    own = ModuleSource(model)
    assert list(own.iter_rest(own.stable_tensors().keys())) == []


@pytest.mark.parametrize("change", [lambda p: p.detach().clone(), lambda p: p.detach()])
def test_a_table_that_was_exchanged_is_noticed_at_once(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(model)
    assert len(source.metadata) == 4
    stable = source.stable_tensors()
    table = model[1]._parameters
    model[1]._parameters = {name: nn.Parameter(change(table[name])) for name in table}
    found = source.stable_tensors()
    assert found is not stable
    for name, parameter in model.named_parameters():
        assert found[name].data_ptr() == parameter.data_ptr()
    assert list(source.iter_rest(found.keys())) == []


@pytest.mark.parametrize(
    ("dtype", "rest"), [(None, 0), (lambda name: torch.bfloat16 if name == "1.bias" else None, 1)]
)
def test_stable_tensors_whose_names_were_exchanged_are_others(dtype, rest):
    """Where nothing or something is left to yield."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(model, dtype=dtype)
    stable = source.stable_tensors()
    assert len(source.metadata) == len(stable) + rest
    first, second = model._modules.values()
    model._modules.clear()
    model._modules.update({"1": first, "0": second})
    again = source.stable_tensors()
    assert again.keys() == stable.keys()
    assert again["0.weight"].data_ptr() == second.weight.data_ptr()
    assert again["1.weight"].data_ptr() == first.weight.data_ptr()
    assert [name for name, _ in source.iter_rest(again.keys())] == ["1.bias"] * rest


def test_names_that_are_exchanged_while_workers_read_are_noticed_where_more_is_yielded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(model, dtype=lambda name: torch.bfloat16 if name == "1.bias" else None)
    assert len(source.metadata) == 4
    stable = source.stable_tensors()
    first, second = model._modules.values()
    model._modules.clear()
    model._modules.update({"1": first, "0": second})
    with pytest.raises(SourceError, match=r"0\.weight is another tensor than the one that workers"):
        list(source.iter_rest(stable.keys()))


def test_a_parameter_that_is_new_is_noticed_before_anything_is_yielded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(model)
    assert len(source.metadata) == 4
    assert len(source.stable_tensors()) == 4
    model.more = nn.Parameter(torch.zeros(1))
    with pytest.raises(SourceError, match=r"more is new in the module"):
        source.stable_tensors()


@pytest.mark.parametrize(("persistent", "problem"), [(True, "no longer in"), (False, "new in")])
def test_a_buffer_that_becomes_persistent_or_ceases_to_be_is_noticed(persistent, problem):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("count", torch.zeros(2), persistent=persistent)
    source = ModuleSource(model, persistent_buffers=True)
    assert ("0.count" in source.stable_tensors()) == persistent
    model[0].register_buffer("count", model[0].count, persistent=not persistent)
    with pytest.raises(SourceError, match=rf"0\.count is {problem} the module"):
        source.stable_tensors()


def test_stable_tensors_are_others_once_a_parameter_is():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    source = ModuleSource(model)
    stable = source.stable_tensors()
    model[1].weight = nn.Parameter(torch.randn(2, 3))
    again = source.stable_tensors()
    assert again is not stable and again.keys() == stable.keys()
    assert again["1.weight"].data_ptr() == model[1].weight.data_ptr()
    model[1].bias.data = torch.randn(2)
    assert source.stable_tensors()["1.bias"].data_ptr() == model[1].bias.data_ptr()
    with torch.no_grad():
        model[1].bias.add_(1)
    assert source.stable_tensors()["1.bias"]._version == model[1].bias._version
    model.append(nn.Linear(3, 2))
    with pytest.raises(SourceError, match=r"2\.bias is new in the module"):
        source.stable_tensors()
    del model[2]
    model[1].weight = None
    with pytest.raises(SourceError, match=r"1\.weight is no longer in the module"):
        source.stable_tensors()


def test_whatever_changes_the_module_between_passes_is_seen():
    """A stable source walks its module again only when something in it is another thing."""
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 2), nn.Linear(3, 2)
    source = ModuleSource(model)

    def passes() -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in source.iter_full()}

    def own() -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}

    assert passes() == own()
    model.a.weight = nn.Parameter(torch.randn(2, 3))
    assert passes() == own()
    model.b = nn.Linear(3, 2)
    assert passes() == own()
    model.a.bias.data = torch.randn(2)  # the same parameter, in another place
    assert passes() == own()
    model.a, model.b = model.b, model.a
    assert passes() == own()
    with torch.no_grad():
        model.a.weight.set_(torch.randn(3, 3))
    with pytest.raises(SourceError, match=r"a\.weight is now \[3, 3\]"):
        passes()
    model.a.weight.data = torch.randn(2, 3)
    model.c = model.a
    del model.a
    with pytest.raises(SourceError, match=r"a\.weight is no longer in the module"):
        passes()


def test_a_source_that_is_not_stable_keeps_no_replaced_parameter_alive():
    model = nn.Linear(3, 2)
    source = ModuleSource(model, stable=False)
    list(source.iter_full())
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.randn(2, 3))
    assert old() is None
    assert [t.data_ptr() for _, t in source.iter_full()] == [
        t.data_ptr() for t in model.parameters()
    ]


def test_replaced_parameters_and_steps_are_seen_by_the_next_pass():
    model = Model()
    source = ModuleSource(model)
    list(source.iter_full())
    model.head.weight = nn.Parameter(torch.full((8, 4), 7.0))
    with torch.no_grad():
        model.norm.bias.add_(5)
    yielded = dict(source.iter_full())
    exact(yielded["head.weight"], torch.full((8, 4), 7.0))
    exact(yielded["norm.bias"], torch.full((4,), 5.0))


def test_parameter_that_disappears_is_refused():
    model = Model()
    source = ModuleSource(model)
    list(source.iter_full())
    del model.head
    with pytest.raises(SourceError, match=r"head\.weight is no longer in the module"):
        list(source.iter_full())


@pytest.mark.parametrize("left_out", [False, True])
def test_parameter_that_appears_is_refused_unless_it_is_left_out(left_out):
    def names(name: str) -> str | None:
        return None if left_out and name.startswith("adapter") else name

    model = Model()
    source = ModuleSource(model, names=names)
    before = [name for name, _ in source.iter_full()]
    model.adapter = nn.Linear(2, 2)
    if left_out:
        assert [name for name, _ in source.iter_full()] == before
        return
    with pytest.raises(
        SourceError,
        match=r"adapter\.bias is new in the module: expected the \d+ .*; build a new .* names=",
    ):
        list(source.iter_full())
    del model.adapter
    assert [name for name, _ in source.iter_full()] == before


def test_wrappers_leave_no_trace_in_names():
    plain = names(ModuleSource(Model()))
    model = Model()
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    model.layers[2] = torch.compile(checkpoint_wrapper(model.layers[2]))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert names(ModuleSource(torch.compile(model))) == plain


def test_fsdp1_segment_is_stripped_and_its_flat_parameter_refused():
    class Fsdp1(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = inner

    assert names(ModuleSource(Fsdp1(nn.Linear(2, 2)))) == ["weight", "bias"]
    flat = nn.Module()
    flat._flat_param = nn.Parameter(torch.zeros(3))
    with pytest.raises(SourceError, match=r"_fsdp_wrapped_module\._flat_param.*FSDP2"):
        _ = ModuleSource(Fsdp1(flat)).metadata


def test_tied_parameters_appear_once_unless_named_again():
    model = Model(tied=True)
    assert "head.weight" not in names(ModuleSource(model))
    source = ModuleSource(model, extra_names={"head.weight": "embed.weight"})
    assert names(source)[-1] == "head.weight"  # in its own gather group, after the layers
    exact(dict(source.iter_full())["head.weight"], model.embed.weight)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [({"head.weight": "embed.weight"}, "is served already"), ({"x": "nowhere"}, "repeats nowhere")],
)
def test_extra_names_must_be_new_names_of_known_ones(extra, problem):
    with pytest.raises(SourceError, match=problem):
        _ = ModuleSource(Model(), extra_names=extra).metadata


def test_masters_are_served_in_another_dtype():
    model = Model()
    model.register_parameter("steps", nn.Parameter(torch.arange(3), requires_grad=False))
    fp8 = torch.randn(4).to(torch.float8_e4m3fn)
    model.register_parameter("packed", nn.Parameter(fp8, requires_grad=False))
    source = ModuleSource(model, dtype=torch.bfloat16)
    dtypes = {meta.name: meta.dtype for meta in source.metadata}
    assert dtypes.pop("steps") == torch.int64
    assert dtypes.pop("packed") == torch.float8_e4m3fn
    assert set(dtypes.values()) == {torch.bfloat16}
    yielded = dict(source.iter_full())
    exact(yielded["embed.weight"], model.embed.weight.to(torch.bfloat16))
    exact(yielded["packed"], fp8)
    assert model.embed.weight.dtype == torch.float32


def test_dtype_can_be_chosen_by_name():
    model = Model()
    source = ModuleSource(model, dtype=lambda n: None if n == "norm.bias" else torch.float16)
    yielded = dict(source.iter_full())
    exact(yielded["norm.bias"], model.norm.bias)
    exact(yielded["norm.weight"], model.norm.weight.half())


def test_non_contiguous_parameters_are_yielded_contiguous():
    model = nn.Module()
    transposed = torch.arange(6.0).reshape(2, 3).t()
    model.weight = nn.Parameter(transposed)
    assert not model.weight.is_contiguous()
    (_, tensor), *_ = ModuleSource(model).iter_full()
    assert tensor.is_contiguous()
    assert_close(tensor, transposed, rtol=0, atol=0)


def test_persistent_buffers_are_served_on_request():
    model = Model()
    assert not any("scale" in name for name in names(ModuleSource(model)))
    source = ModuleSource(model, persistent_buffers=True)
    assert [name for name in names(source) if "layers.1" in name] == [
        "layers.1.proj.weight",
        "layers.1.scale",
    ]
    assert not any("cache" in name for name in names(source))
    exact(dict(source.iter_full())["layers.2.scale"], torch.full((2,), 3.0))


def test_names_are_mapped_explicitly():
    model = Model()
    source = ModuleSource(model, names=lambda n: None if n == "norm.bias" else f"model.{n}")
    assert "model.layers.0.proj.weight" in names(source)
    assert not any("norm.bias" in name for name in names(source))
    with pytest.raises(SourceError, match=r"both named same.*layers\.0\.proj\.weight"):
        _ = ModuleSource(model, names=lambda _: "same").metadata


@pytest.mark.parametrize("kind", [ModuleSource, ShardedModuleSource])
@pytest.mark.parametrize("module", ["org/model", None, {"a": nn.Linear(1, 1)}, nn.Linear])
def test_what_is_no_module_is_refused_at_once(kind, module):
    for make in (kind, kind.of_transformers):
        with pytest.raises(SourceError, match=r"a torch\.nn\.Module, found .{4}.*pass the model"):
            make(module)


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(SourceError, match="weight is on the meta device"):
        _ = ModuleSource(model).metadata


@pytest.mark.parametrize(
    ("device", "before", "message"),
    [
        ("cuda", True, r"b is on cuda:0, and a on cpu: expected a module on one device; move it"),
        ("xpu", False, r"b is on xpu:0: expected a tensor on the CPU or on a CUDA.*\.cpu\(\)"),
    ],
)
def test_a_module_on_two_devices_or_one_that_is_not_served_is_refused(device, before, message):
    found = {"a": nn.Parameter(torch.empty(2))} if before else {}
    with FakeTensorMode():  # says where it is, where there is none
        found["b"] = nn.Parameter(torch.empty(2, device=device))
    with pytest.raises(SourceError, match=message):
        _ = ModuleSource(nn.ParameterDict(found)).metadata


def test_fsdp2_parameters_are_gathered_by_their_mesh(tmp_path):
    """Two ranks shard one model; each yields it whole, cast, and describes it whole."""
    import torch.multiprocessing as mp

    mp.spawn(_yield_sharded, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    torch.manual_seed(0)
    expected = dict(Model().named_parameters())
    for rank in range(2):
        metas, yielded = torch.load(tmp_path / f"rank{rank}", weights_only=True)
        assert {owners for _, _, owners in metas} == {(0, 1)}
        assert [name for name, _, _ in metas] == [name for name, _ in yielded]
        for (_, shape, _), (name, tensor) in zip(metas, yielded, strict=True):
            assert shape == tuple(tensor.shape)
            exact(tensor, expected[name].to(torch.bfloat16))


def _yield_sharded(rank: int, init_method: str, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = Model()
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
        assert isinstance(model.head.weight, DTensor)
        source = ModuleSource(model, dtype=torch.bfloat16)
        metas = [(m.name, m.shape, m.owners) for m in source.metadata]
        torch.save((metas, list(source.iter_full())), f"{folder}/rank{rank}")
    finally:
        torch.distributed.destroy_process_group()
