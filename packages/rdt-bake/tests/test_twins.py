"""The model is left exactly as it was found."""

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import RebindError, record
from rdt_bake.tensors import geometry, is_foreign, storage_key
from rdt_bake.twins import MetaTwins
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
ONE = [ParamMeta("w", "float32", (4, 4))]


class LoadedParameter(nn.Parameter):
    """A parameter that carries its own loader and attributes, and makes sense only built right."""

    def __new__(cls, data: Tensor, *args: Any) -> "LoadedParameter":
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, loader: Any, shard: int) -> None:
        self._loader = loader
        self.shard = shard

    @property
    def weight_loader(self) -> Any:
        return self._loader

    @weight_loader.deleter
    def weight_loader(self) -> None:
        self._loader = None

    def load_row(self, weight: Tensor) -> None:
        self.data.copy_(weight.narrow(0, self.shard, self.shape[0]))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = LoadedParameter(torch.ones(2, 4), self.load_row, 1)
        self.register_parameter("absent", None)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.plain = torch.arange(4.0)
        self.listed = [torch.zeros(1), "text", torch.zeros(2)]
        self.keyed = {"k": torch.zeros(1), 3: torch.zeros(2), "other": 7}
        self.paired = Pair(torch.zeros(1), torch.zeros(2))
        self.tupled = (torch.zeros(2), 5)
        self.names = {"seen"}
        self.flag = False
        self.grad_param = nn.Parameter(torch.ones(4))
        self.grad_param.register_hook(lambda grad: grad)

    def load_row(self, param: Any, weight: Tensor) -> None:
        param.load_row(weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.shared = self.layers[0]
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.fused = nn.Parameter(torch.zeros(6, 2))
        self.upper = nn.Parameter(self.fused.data[:3])
        self.on_meta = nn.Parameter(torch.empty(2, 2, device="meta"))
        self.on_meta.note = "mine"
        self.register_forward_hook(lambda *_: None)
        self.lazy = nn.LazyLinear(3)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Identities and geometries of everything reachable; order counts."""
    seen: dict[str, Any] = {}

    def note(path: str, value: Any, depth: int) -> None:
        seen[path] = id(value)
        if isinstance(value, Tensor):
            seen[f"{path}!class"] = type(value)
            seen[f"{path}!grad"] = value.requires_grad
            seen[f"{path}!version"] = value._version
            if not isinstance(value, nn.UninitializedParameter):
                seen[f"{path}!geometry"] = geometry(value)
                seen[f"{path}!ptr"] = value.data_ptr()
            for key, item in value.__dict__.items():
                note(f"{path}@{key}", item, depth + 1)
        elif isinstance(value, dict):
            seen[f"{path}!keys"] = list(value)
            if depth < 3:
                for key, item in value.items():
                    note(f"{path}[{key!r}]", item, depth + 1)
        elif isinstance(value, (list, tuple)):
            seen[f"{path}!len"] = len(value)
            for key, item in enumerate(value):
                note(f"{path}[{key}]", item, depth + 1)
        elif isinstance(value, set):
            seen[f"{path}!set"] = sorted(map(str, value))

    for name, module in model.named_modules(remove_duplicate=False):
        note(f"{name}:", module.__dict__, 0)
    return seen


def good(model: Model, pairs: Pairs) -> None:
    params = dict(model.named_parameters())
    for _, weight in pairs:
        row = params["layers.0.row"]
        row.weight_loader(row, weight)
        params["fused"].data[:, 0].fill_(1)
        model.layers[1].mean.zero_()


def messy(model: Model, pairs: Pairs) -> None:
    """Changes whatever a loader could change, then copies."""
    layer = model.layers[0]
    layer.flag = True
    layer.new_attribute = [1, 2]
    layer.listed.append("more")
    layer.listed[1] = "other"
    layer.keyed["added"] = 3
    del layer.keyed["other"]
    layer.names.add("another")
    layer.names.discard("seen")
    del layer.row.weight_loader
    layer.row.extra = 1
    model.on_meta.note = "changed"
    model.on_meta.more = "added"
    model.on_meta.requires_grad_(False)
    layer.register_forward_pre_hook(lambda *_: None)
    model.add_module("extra", nn.Identity())
    layer.register_buffer("other", None)
    layer._non_persistent_buffers_set.add("other")
    layer.requires_grad_(False)


def raising(model: Model, pairs: Pairs) -> None:
    messy_but_one(model, pairs)
    raise KeyError("loader failed")


def messy_but_one(model: Model, pairs: Pairs) -> None:
    next(iter(pairs))
    model.layers[0].row = nn.Parameter(torch.zeros(3))
    model.layers[1].plain = None
    model.on_meta.data = torch.empty(5, device="meta")
    model.layers[1].mean = torch.ones(3)
    model.embed.weight.data = torch.zeros(1, device="meta")
    model.lazy.weight.materialize((3, 4))
    del model.layers[1].row
    del model.layers[1].keyed["k"]
    model.layers[0].listed.clear()
    model.layers[0].paired = None
    del model.fused


def refused(model: Model, pairs: Pairs) -> None:
    for _, weight in pairs:
        model.embed.weight.data.copy_(weight + 1)
        model.embed.weight.data[0].copy_(weight.sum().item())


@pytest.mark.parametrize(
    "load, error",
    [
        (good, None),
        (raising, KeyError),
        (messy_but_one, RebindError),
        (refused, Exception),
    ],
)
def test_everything_is_restored(load: Any, error: type[Exception] | None) -> None:
    model = Model()
    before = snapshot(model)
    if error is None:
        record(model, lambda pairs: load(model, pairs), ONE)
    else:
        with pytest.raises(error):
            record(model, lambda pairs: load(model, pairs), ONE)
    after = snapshot(model)
    assert after == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_attributes_containers_and_hooks_are_restored() -> None:
    model = Model()
    before = snapshot(model)

    def load(pairs: Pairs) -> None:
        messy(model, [])

    record(model, load, ONE)
    assert snapshot(model) == before


def test_recording_twice_gives_the_same() -> None:
    model = Model()
    first = record(model, lambda pairs: good(model, pairs), ONE)
    assert record(model, lambda pairs: good(model, pairs), ONE) == first
    assert len(first.placements) == 1


def test_twins_look_like_their_originals() -> None:
    model = Model()
    row, plain, paired = model.layers[0].row, model.layers[0].plain, model.layers[0].paired
    with MetaTwins(model) as twins:
        twin = model.layers[0].row
        assert twin is not row and twin.is_meta
        assert type(twin) is LoadedParameter and twin.__dict__ == row.__dict__
        assert (twin.shape, twin.stride(), twin.dtype) == (row.shape, row.stride(), row.dtype)
        assert twin.weight_loader == row.weight_loader and twin.shard == 1
        assert isinstance(model.layers[0].paired, Pair)
        assert all(t.is_meta for t in model.layers[0].paired)
        assert model.layers[0].listed[1] == "text" and model.layers[0].listed[2].is_meta
        assert model.layers[0].tupled[1] == 5 and model.layers[0].tupled[0].is_meta
        assert model.layers[0].keyed[3].is_meta
        assert model.head.weight is model.embed.weight and model.head.weight.requires_grad
        assert model.on_meta is model._parameters["on_meta"]
        assert model.shared.row is twin
        # Twins of views of one storage share one storage, at the same offsets.
        assert storage_key(model.upper) == storage_key(model.fused) != storage_key(twin)
        assert twins.storages[storage_key(row)] is twins.storages[storage_key(twin)]
        assert {reason for _, reason in twins.foreign.values()} == {
            "it is uninitialised, so it has no shape"
        }
    assert model.layers[0].row is row and model.layers[0].plain is plain
    assert model.layers[0].paired is paired


def test_places_of_one_tensor_are_aliases() -> None:
    model = Model()
    recording = record(model, lambda pairs: good(model, pairs), ONE)
    groups = set(recording.aliases)
    assert (("embed", "weight"), ("head", "weight")) in groups
    assert (("layers.0", "row"), ("shared", "row")) in groups
    assert (("layers.0", "keyed[3]"), ("shared", "keyed[3]")) in groups
    assert not any("upper" in spot for group in groups for spot in group)
    assert {each.param for each in recording.uncovered if not each.module} == {
        "fused",
        "on_meta",
        "upper",
    }


def test_writes_through_one_view_of_a_storage_cover_the_others() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.zeros(8)[:4].view(2, 2), requires_grad=False)
            self.whole = torch.empty(0).set_(self.low.untyped_storage())
            self.high = nn.Parameter(self.whole[4:], requires_grad=False)

    model = Fused()

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.whole.data.copy_(weight.view(-1)[:8])

    recording = record(model, load, ONE)
    assert recording.uncovered == ()
    assert [(write.param, write.offset) for write in recording.writes] == [("whole", 0)]


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter, LoadedParameter, nn.Buffer])
def test_plain_subclasses_are_not_foreign(kind: type) -> None:
    assert not is_foreign(kind)


def test_ordered_dicts_keep_their_order() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = OrderedDict(b=torch.zeros(1), a=torch.zeros(1))

    model = Ordered()
    record(model, lambda pairs: model.tables.move_to_end("b"), ONE)
    assert list(model.tables) == ["b", "a"]


def entered(context: Any, really: bool) -> Any:
    return context() if really else contextlib.nullcontext()


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("built_inside", [False, True])
@pytest.mark.parametrize("recorded_inside", [False, True])
def test_inference_tensors_and_modes(
    context: Any, built_inside: bool, recorded_inside: bool
) -> None:
    with entered(context, built_inside):
        model = nn.Linear(4, 4)
        model.cache = torch.zeros(2)
    before = (model.weight, model.bias, model.cache, model.weight.data_ptr())

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.data.copy_(weight.t())
            model.bias.data.zero_()
            model.cache.data.copy_(weight[0, :2])

    with entered(context, recorded_inside):
        recording = record(model, load, ONE)
    assert len(recording.writes) == 3
    after = (model.weight, model.bias, model.cache, model.weight.data_ptr())
    assert all(a is b for a, b in zip(before[:3], after[:3], strict=True)) and before[3] == after[3]


def test_tensors_that_cannot_be_watched_are_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(2).to_sparse())
            self.register_buffer("expanded", torch.zeros(1).expand(4))
            self.register_buffer("conjugated", torch.zeros(2, dtype=torch.complex64).conj())
            self.tied = nn.Parameter(torch.zeros(1).expand(4))

    model = Odd()
    before = dict(model._buffers)
    with MetaTwins(model) as twins:
        assert {place.param: reason for place, reason in twins.foreign.values()} == {
            "sparse": "its layout is torch.sparse_coo",
            "expanded": "it overlaps itself",
            "conjugated": "it has a conjugate or negative bit",
            "tied": "it overlaps itself",
        }
        assert all(model._buffers[name] is tensor for name, tensor in before.items())
    assert [each.param for each in record(model, lambda pairs: None, ONE).uncovered] == ["tied"]


def test_a_restore_that_fails_restores_the_rest_first() -> None:
    class Stubborn(nn.Parameter):
        def requires_grad_(self, requires_grad: bool = True) -> Tensor:
            raise RuntimeError("cannot change")

    kinds = [nn.Parameter, Stubborn, nn.Parameter]
    model = nn.ParameterList([kind(torch.zeros(2, device="meta")) for kind in kinds])
    before = list(model)

    def load(pairs: Pairs) -> None:
        for param in model:
            Tensor.requires_grad_(param, False)
        model.append(torch.zeros(1))

    with pytest.raises(RuntimeError, match="cannot change"):
        record(model, load, ONE, exempt=lambda module, param: True)
    assert all(a is b for a, b in zip(model, before, strict=True))
    assert [param.requires_grad for param in model] == [True, False, True]


class Refusing(dict):
    """A dict whose own methods refuse, and that counts what was set."""

    def __init__(self, **items: Any) -> None:
        dict.update(self, items)
        self.log = ["made"]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.log.append(key)

    def clear(self) -> None:
        raise RuntimeError("cannot clear")

    copy = update = clear


class Nested(nn.Module):
    """Containers in containers of every kind, in modules and on tensors; one holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = {"seen": [], "sets": {"a": {1, 2}}, "ordered": OrderedDict(b=[1], a=[2])}
        self.l = [[], ({"in a tuple": [0]}, 1), deque([1, [2]], maxlen=2), (1, 2)]
        self.counts = [Counter(a=2), defaultdict(list, k=[1]), Refusing(k=[1])]
        self.cycle: list[Any] = [{}]
        self.cycle[0]["back"] = self.cycle
        self.unregistered = {"layers": [[nn.Linear(2, 2)]]}
        self.unregistered["layers"][0][0].seen = [0]
        self.deep = [[torch.zeros(2), torch.nested.nested_tensor([torch.zeros(1)])]]
        self.deep[0][0].names = [["x"]]
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.weight.shards = [{"q": [0]}]


def contents(value: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    """Identity and order of all that containers, modules and tensors reach, by path."""
    found[path] = id(value)
    if id(value) in found.setdefault("seen", []):
        return found
    if isinstance(value, (nn.Module, Tensor, Refusing)):
        found["seen"].append(id(value))
        contents(value.__dict__, f"{path}.", found)
    if isinstance(value, Tensor) and not value.is_nested:
        found[f"{path}!"] = geometry(value), value.requires_grad
    if isinstance(value, (dict, list, tuple, set, deque)):
        found["seen"].append(id(value))
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        found[f"{path}!"] = [key for key, _ in items]
        for key, item in items:
            contents(item, f"{path}[{key!r}]", found)
    return found


def change_deeply(model: Nested) -> None:
    model.cfg["seen"].append("w")
    model.cfg["sets"]["a"].add(3)
    model.cfg["sets"]["b"] = {}
    model.cfg["ordered"].move_to_end("b")
    model.cfg["ordered"]["a"].clear()
    model.l[0].append("w")
    model.l[1][0]["in a tuple"].append(1)
    model.l[2].append(3)
    model.l[2][0].append(3)
    model.l[3] = tuple([1, 2])  # equal, and another
    model.counts[0]["a"] += 1
    model.counts[1]["new"].append(1)
    model.counts[1]["k"].append(1)
    model.counts[2]["k"] = 1
    model.cycle[0]["back"] = None
    hidden = model.unregistered["layers"][0][0]
    hidden.seen.append(1)
    hidden.weight.requires_grad_(False)
    model.unregistered["layers"][0].append(nn.Identity())
    model.deep[0][0].names[0].append("y")
    model.deep[0][0].data = torch.zeros(3)
    model.deep[0].pop()
    model.weight.shards[0]["q"].append(1)
    model.weight.shards.append({})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("raises", [False, True])
def test_nested_containers_are_restored(raises: bool) -> None:
    model = Nested()
    before = contents(model, "", {})
    counts = [dict(model.counts[0]), dict(model.counts[1]), dict(model.counts[2])]

    def load(pairs: Pairs) -> None:
        for _, weight in pairs:
            model.weight.copy_(weight)
        change_deeply(model)
        assert contents(model, "", {}) != before
        if raises:
            raise KeyError("loader failed")

    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        record(model, load, ONE)
    assert contents(model, "", {}) == before
    assert [dict(held) for held in model.counts] == counts
    assert model.cfg["seen"] == model.l[0] == []


def test_containers_nested_deeply_are_restored() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.nest = innermost = []
    for _ in range(5000):
        model.nest = [model.nest]
    record(model, lambda pairs: innermost.append(1), ONE)
    assert innermost == []


def test_what_other_objects_hold_is_theirs() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.helper = SimpleNamespace(count=0)
    record(model, lambda pairs: setattr(model.helper, "count", 1), ONE)
    assert model.helper.count == 1


def test_a_model_that_cannot_be_swapped_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    before = snapshot(model)
    made = []

    def make(kind: type, data: Tensor, grad: bool) -> Tensor:
        made.append(kind)
        if len(made) == 2:
            raise MemoryError
        return torch.nn.Parameter(data, grad)

    monkeypatch.setattr(torch.Tensor, "_make_subclass", make)
    with pytest.raises(MemoryError):
        record(model, lambda pairs: None, ONE)
    monkeypatch.undo()
    assert snapshot(model) == before
