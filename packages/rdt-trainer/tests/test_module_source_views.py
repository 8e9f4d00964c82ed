"""A module whose tensors a checkpoint has in parts."""

import logging

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rdt_plan.manifest import Manifest
from rdt_trainer.collector import GroupCollector
from rdt_trainer.errors import SourceError
from rdt_trainer.module_source import ModuleSource
from rdt_trainer.named_module import Named
from rdt_trainer.named_views import NamedView
from rdt_trainer.source import adapt

NUM_EXPERTS = 3


class Experts(nn.Module):
    """All experts of a layer in one tensor, gate beside up, and all of their down projections."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 8, 4))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Experts() for _ in range(2))


def parts(name: str) -> Named:
    """Gate and up are rows of an expert; down is stored transposed."""
    prefix, _, kind = name.rpartition(".")
    if kind == "gate_up":
        return [
            NamedView(
                f"{prefix}.{expert}.{half}", lambda t, e=expert, h=half: t[e].chunk(2)[h == "up"]
            )
            for expert in range(NUM_EXPERTS)
            for half in ("gate", "up")
        ]
    if kind == "down":
        return [
            NamedView(f"{prefix}.{expert}.down", lambda t, e=expert: t[e].t())
            for expert in range(NUM_EXPERTS)
        ]
    return name


def expected(model: Model) -> dict[str, torch.Tensor]:
    found = {"embed.weight": model.embed.weight}
    for index, layer in enumerate(model.layers):
        for expert in range(NUM_EXPERTS):
            gate, up = layer.gate_up[expert].chunk(2)
            found[f"layers.{index}.{expert}.gate"] = gate
            found[f"layers.{index}.{expert}.up"] = up
            found[f"layers.{index}.{expert}.down"] = layer.down[expert].t()
    return {name: tensor.detach() for name, tensor in found.items()}


def check(yielded: list[tuple[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    assert {name for name, _ in yielded} == wanted.keys()
    assert len(yielded) == len(wanted)
    for name, tensor in yielded:
        assert tensor.dtype == wanted[name].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, wanted[name])


def test_every_pass_yields_the_parts_that_metadata_declares():
    model = Model()
    source = ModuleSource(model, names=parts)
    for _ in range(2):
        yielded = list(source.iter_full())
        assert [(m.name, m.shape) for m in source.metadata] == [
            (name, tuple(tensor.shape)) for name, tensor in yielded
        ]
        check(yielded, expected(model))
        with torch.no_grad():
            model.layers[1].gate_up.add_(1)
            model.layers[0].down = nn.Parameter(torch.randn(NUM_EXPERTS, 4, 4))
    manifest = Manifest.build(adapt(source).params)
    assert [group.key for group in manifest.groups] == ["pre", "layers.0", "layers.1"]


def test_rows_are_served_from_the_parameter_and_a_transposed_part_is_copied_and_said(caplog):
    model = Model()
    source = ModuleSource(model, names=parts)
    with caplog.at_level(logging.INFO, logger="rdt_trainer"):
        yielded = dict(source.iter_full())
        list(source.iter_full())
    fused = model.layers[1].gate_up
    row_bytes = fused[0, 0].nbytes
    assert yielded["layers.1.2.up"].data_ptr() == fused.data_ptr() + (2 * 8 + 4) * row_bytes
    memory = model.layers[1].down.untyped_storage().data_ptr()
    assert yielded["layers.1.2.down"].untyped_storage().data_ptr() != memory
    (record,) = caplog.records
    assert record.getMessage().startswith("6 of 19 checkpoint names, layers.0.0.down first")


def test_rows_are_stable_and_what_is_copied_or_cast_is_not():
    model = Model()
    source = ModuleSource(model, names=parts)
    stable = source.stable_tensors()
    copied = {name for name in expected(model) if name.endswith("down")}
    assert stable.keys() == expected(model).keys() - copied and len(copied) == 6
    for name, tensor in source.iter_full():
        assert name in copied or tensor.data_ptr() == stable[name].data_ptr()
    assert not ModuleSource(model, names=parts, dtype=torch.bfloat16).stable_tensors()


def test_masters_are_cast_whole_before_they_are_taken_apart():
    model = Model()
    source = ModuleSource(model, names=parts, dtype=torch.bfloat16)
    wanted = {name: tensor.bfloat16() for name, tensor in expected(model).items()}
    yielded = list(source.iter_full())
    check(yielded, wanted)
    casts = {t.untyped_storage().data_ptr() for name, t in yielded if name.endswith(("gate", "up"))}
    assert len(casts) == 2  # one a layer


def test_parts_of_one_tensor_may_differ_in_dtype():
    model = Model()
    source = ModuleSource(
        model, names=parts, dtype=lambda n: torch.float16 if n.endswith("up") else None
    )
    wanted = expected(model)
    check(
        list(source.iter_full()),
        {n: t.half() if n.endswith("up") else t for n, t in wanted.items()},
    )


def test_a_cast_tensor_is_kept_until_its_last_part_and_no_longer():
    source = ModuleSource(Model(), names=parts, dtype=torch.bfloat16)
    memory: dict[str, StorageWeakRef] = {}
    for name, tensor in source.iter_full():
        memory[name] = StorageWeakRef(tensor.untyped_storage())
        del tensor
        if name == "layers.0.2.gate":
            assert not memory["layers.0.0.gate"].expired()
        if name == "layers.0.0.down":
            assert memory["layers.0.2.up"].expired()


def test_a_table_maps_every_tensor():
    model = nn.ModuleDict({"a": nn.Linear(2, 4, bias=False), "b": nn.Linear(2, 2, bias=False)})
    halves = [NamedView("x", lambda t: t[:2]), NamedView("y", lambda t: t[2:])]
    source = ModuleSource(model, names={"a.weight": halves, "b.weight": None})
    check(
        list(source.iter_full()),
        {"x": model["a"].weight.detach()[:2], "y": model["a"].weight.detach()[2:]},
    )
    with pytest.raises(SourceError, match=r"does not list b\.weight: map it, to None"):
        _ = ModuleSource(model, names={"a.weight": "a"}).metadata
    with pytest.raises(SourceError, match=r"lists c, which is none of the 2 tensors"):
        _ = ModuleSource(model, names={"a.weight": "a", "b.weight": "b", "c": "c"}).metadata


def test_a_part_may_have_a_further_name():
    model = Model()
    source = ModuleSource(model, names=parts, extra_names={"head": "layers.0.1.up"})
    yielded = list(source.iter_full())
    check(yielded, {**expected(model), "head": model.layers[0].gate_up.detach()[1, 4:]})
    assert yielded[-1][0] == "head"


def test_nothing_is_kept_for_a_further_name_that_comes_groups_later():
    extra = {"head": "layers.0.1.up"}
    source = ModuleSource(Model(), names=parts, extra_names=extra, dtype=torch.bfloat16)
    memory: dict[str, StorageWeakRef] = {}
    for name, tensor in source.iter_full():
        memory[name] = StorageWeakRef(tensor.untyped_storage())
        del tensor
        if name == "layers.1.0.gate":
            assert memory["layers.0.1.up"].expired()
    assert "head" in memory


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], r"element \[0, 0, 0\] of layers\.0\.gate_up \[3, 8, 4\].*none of 0"),
        ([NamedView("a", lambda t: t[1:])], r"element \[0, 0, 0\] of layers\.0\.gate_up"),
        ([NamedView("a"), NamedView("b")], r"b repeats elements of layers\.0\.gate_up"),
        ([NamedView("a", lambda t: t * 1)], r"a, a view of layers\.0\.gate_up, is a new tensor"),
        ([NamedView("embed.weight")], r"both named embed\.weight, embed\.weight and layers\.0\.g"),
    ],
)
def test_a_mapping_that_does_not_add_up_is_refused(views, message):
    source = ModuleSource(Model(), names=lambda n: views if n == "layers.0.gate_up" else n)
    with pytest.raises(SourceError, match=message):
        _ = source.metadata


def test_a_tensor_that_changes_shape_is_refused():
    model = Model()
    source = ModuleSource(model, names=parts)
    list(source.iter_full())
    model.layers[1].gate_up = nn.Parameter(torch.zeros(NUM_EXPERTS, 4, 8))
    with pytest.raises(
        SourceError, match=r"layers\.1\.gate_up is now \[3, 4, 8\]: expected .*8, 4"
    ):
        list(source.iter_full())


def test_a_change_during_a_pass_is_noticed_through_its_views():
    model = Model()
    source = adapt(ModuleSource(model, names=parts))
    manifest = Manifest.build(source.params)
    collector = GroupCollector(manifest, 0, iter(source.new_pass()), torch.device("cpu"))
    for group in range(2):
        collector.collect(group)
    collector.check_unchanged()
    with torch.no_grad():
        model.layers[0].gate_up[1, 0, 0] = 7
    with pytest.raises(SourceError, match=r"layers\.0\.0\.gate.*changed in place"):
        collector.check_unchanged()


def test_sharded_tensors_are_gathered_before_they_are_taken_apart(tmp_path):
    """Two ranks shard one model; each yields every part, cast."""
    import torch.multiprocessing as mp

    mp.spawn(_yield_sharded, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    torch.manual_seed(0)
    wanted = {name: tensor.bfloat16() for name, tensor in expected(Model()).items()}
    for rank in range(2):
        check(torch.load(tmp_path / f"rank{rank}", weights_only=True), wanted)


def _yield_sharded(rank: int, init_method: str, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = Model()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        source = ModuleSource(model, names=parts, dtype=torch.bfloat16)
        assert {meta.owners for meta in source.metadata} == {(0, 1)}
        torch.save(list(source.iter_full()), f"{folder}/rank{rank}")
    finally:
        torch.distributed.destroy_process_group()
