import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close

from rdt_plan.manifest import Manifest
from rdt_trainer.errors import SourceError
from rdt_trainer.module_source import ModuleSource
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


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(SourceError, match="weight is on the meta device"):
        _ = ModuleSource(model).metadata


def test_parameters_on_another_device_are_refused():
    with FakeTensorMode():  # says that it is on a GPU, where there is none
        model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(2, device="cuda"))})
    with pytest.raises(SourceError, match=r"weight is on cuda:0: expected .* CPU.*\.cpu\(\)"):
        _ = ModuleSource(model).metadata


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
