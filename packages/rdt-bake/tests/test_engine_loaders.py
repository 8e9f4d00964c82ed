"""Miniatures of how inference engines load weights, each against its own real load."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import fetch_from, record, replay
from rdt_bake.testing import check_recording, random_weights
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]


class ShardedParameter(nn.Parameter):
    """A parameter that knows how to take its shard, by methods of its own class."""

    def __new__(cls, data: Tensor, **attributes: Any) -> "ShardedParameter":
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, **attributes: Any) -> None:
        self._weight_loader = attributes.pop("weight_loader")
        self.__dict__.update(attributes)

    @property
    def weight_loader(self) -> Callable[..., None]:
        return self._weight_loader

    def load_column(self, weight: Tensor, offset: int, size: int, rank: int) -> None:
        into = self.data.narrow(self.output_dim, offset, size)
        weight = weight.narrow(self.output_dim, rank * size, size)
        assert into.shape == weight.shape
        into.copy_(weight)

    def load_row(self, weight: Tensor) -> None:
        size = self.data.shape[self.input_dim]
        weight = weight.narrow(self.input_dim, self.tp_rank * size, size)
        if weight.dim() == 0:
            weight = weight.reshape(1)
        assert self.data.shape == weight.shape
        self.data.copy_(weight)

    def load_scalar(self, weight: Tensor, index: int) -> None:
        if weight.dim():
            assert weight.shape[0] == 1
            weight = weight[0]
        self.data[index].copy_(weight)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def default_loader(param: nn.Parameter, weight: Tensor) -> None:
    if param.numel() == 1 and weight.numel() == 1:
        param.data.copy_(weight.view(param.shape))
    else:
        assert param.size() == weight.size()
        param.data.copy_(weight)


class QkvLinear(nn.Module):
    """Fused q, k, v of one tensor-parallel rank; kv heads may be shared by several ranks."""

    def __init__(self, rank: int, size: int, heads: int, kv_heads: int, head: int, hidden: int):
        super().__init__()
        self.rank, self.head = rank, head
        self.num_heads = heads // size
        self.num_kv_heads = max(1, kv_heads // size)
        self.replicas = max(1, size // kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * head
        self.weight = ShardedParameter(
            torch.empty(rows, hidden, dtype=torch.bfloat16),
            weight_loader=self.load,
            output_dim=0,
            input_dim=1,
        )
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False)
        self.bias.weight_loader = self.load_bias
        self.bias.output_dim = 0
        self.input_scale = ShardedParameter(torch.empty(3), weight_loader=self.load_scale)

    def place(self, shard: str) -> tuple[int, int, int]:
        sizes = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        starts = {"q": 0, "k": self.num_heads, "v": self.num_heads + self.num_kv_heads}
        rank = self.rank if shard == "q" else self.rank // self.replicas
        return starts[shard] * self.head, sizes[shard] * self.head, rank

    def load(self, param: ShardedParameter, weight: Tensor, shard: str) -> None:
        param.load_column(weight, *self.place(shard))

    def load_bias(self, param: nn.Parameter, weight: Tensor, shard: str) -> None:
        offset, size, rank = self.place(shard)
        into = param.data.narrow(param.output_dim, offset, size)
        into.copy_(weight.narrow(param.output_dim, rank * size, size))

    def load_scale(self, param: ShardedParameter, weight: Tensor, shard: str) -> None:
        param.load_scalar(weight, "qkv".index(shard))


class VocabEmbedding(nn.Module):
    """Rows of a vocabulary padded to a multiple of 8, split over ranks."""

    def __init__(self, rank: int, size: int, vocab: int, hidden: int) -> None:
        super().__init__()
        padded = -(-vocab // 8) * 8
        rows = padded // size
        self.start = min(rank * rows, vocab)
        self.count = min((rank + 1) * rows, vocab) - self.start
        self.weight = nn.Parameter(torch.empty(rows, hidden), requires_grad=False)
        self.weight.weight_loader = self.load
        self.weight.output_dim = 0

    def load(self, param: nn.Parameter, weight: Tensor) -> None:
        weight = weight.narrow(param.output_dim, self.start, self.count)
        param[: weight.shape[0]].data.copy_(weight)
        param[weight.shape[0] :].data.fill_(0)


class Experts(nn.Module):
    """Fused experts of one expert-parallel rank, found through a map that is a real tensor."""

    def __init__(self, rank: int, size: int, num_experts: int, inner: int, hidden: int) -> None:
        super().__init__()
        local = num_experts // size
        expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
        expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
        self.register_buffer("expert_map", expert_map)
        self.inner = inner
        self.w13 = nn.Parameter(torch.empty(local, 2 * inner, hidden), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(local, hidden, inner), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts), requires_grad=False)
        for param in (self.w13, self.w2):
            param.weight_loader = self.load

    def load(self, param: nn.Parameter, weight: Tensor, shard: str, expert: int) -> None:
        local = self.expert_map[expert].item()
        if local == -1:
            return
        into = param.data[local]
        if shard == "w2":
            into.copy_(weight.to(param.device))
            return
        start = 0 if shard == "w1" else self.inner
        into.narrow(0, start, self.inner).copy_(weight)


class Model(nn.Module):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.embed = VocabEmbedding(rank, size, 21, 6)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.qkv = QkvLinear(rank, size, heads=4, kv_heads=2, head=3, hidden=6)
        self.out = nn.Module()
        self.out.weight = ShardedParameter(
            torch.empty(6, 12 // size, dtype=torch.float16),
            weight_loader=lambda param, weight: param.load_row(weight),
            input_dim=1,
            output_dim=0,
            tp_rank=rank,
        )
        self.experts = Experts(rank, size, 4, 5, 6)
        self.norm = nn.Parameter(torch.empty(6), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)

    def load_weights(self, pairs: Pairs) -> set[str]:
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in pairs:
            if name == "lm_head":
                continue  # tied
            if name.startswith("qkv."):
                _, shard, kind = name.split(".")
                param = params[f"qkv.{kind}"]
                param.weight_loader(param, weight, shard)
            elif name.startswith("experts.") and not name.endswith("bias"):
                _, expert, shard = name.split(".")
                param = params["experts.w2" if shard == "w2" else "experts.w13"]
                param.weight_loader(param, weight, shard, int(expert))
            elif name == "experts.e_score_correction_bias":
                params[name].data.copy_(weight.to(torch.float32))
            else:
                param = params[name]
                getattr(param, "weight_loader", default_loader)(param, weight)
            loaded.add(name)
        return loaded


PARAMS = [
    ParamMeta("embed.weight", "bfloat16", (21, 6)),
    ParamMeta("lm_head", "bfloat16", (21, 6)),
    ParamMeta("qkv.q.weight", "bfloat16", (12, 6)),
    ParamMeta("qkv.k.weight", "bfloat16", (6, 6)),
    ParamMeta("qkv.v.weight", "bfloat16", (6, 6)),
    ParamMeta("qkv.q.bias", "float32", (12,)),
    ParamMeta("qkv.k.bias", "float32", (6,)),
    ParamMeta("qkv.v.bias", "float32", (6,)),
    ParamMeta("qkv.q.input_scale", "float32", ()),
    ParamMeta("qkv.k.input_scale", "float32", (1,)),
    ParamMeta("qkv.v.input_scale", "float32", ()),
    ParamMeta("out.weight", "float16", (6, 12)),
    *(ParamMeta(f"experts.{e}.{w}", "float32", (5, 6)) for e in range(4) for w in ("w1", "w3")),
    *(ParamMeta(f"experts.{e}.w2", "float32", (6, 5)) for e in range(4)),
    ParamMeta("experts.e_score_correction_bias", "bfloat16", (4,)),
    ParamMeta("norm", "float32", (6,)),
    ParamMeta("scale", "float32", ()),
]


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2), (3, 4), (2, 4)])
def test_a_sharded_model(rank: int, size: int) -> None:
    recording = check_recording(
        lambda: Model(rank, size), lambda m, pairs: m.load_weights(pairs), PARAMS
    )
    recording.require_coverage()
    assert recording.aliases[0] == (("embed", "weight"), ("head", "weight"))
    local = 4 // size
    mine = {f"experts.{e}.w1" for e in range(rank * local, (rank + 1) * local)}
    assert {name for name in recording.consumed if name.endswith("w1")} == mine
    assert "lm_head" in recording.ignored
    landed = sum(write.slice.num_bytes for write in recording.placements)
    assert recording.bytes_pulled == landed


def test_the_padding_of_a_vocabulary_is_a_fill() -> None:
    """The last rank holds the padding rows; a rank that holds nothing else holds only a fill."""
    recording = record(model := Model(3, 4), lambda pairs: model.load_weights(pairs), PARAMS)
    (fill,) = recording.fills
    assert (fill.module, fill.shape, fill.offset, fill.value) == ("embed", (18,), 18, 0.0)


def test_a_model_on_meta_records_the_same() -> None:
    """As an engine's layer-wise reload leaves it: parameters on meta, the expert map real."""
    real = record(model := Model(1, 2), lambda pairs: model.load_weights(pairs), PARAMS)
    on_meta = Model(1, 2)
    for module in on_meta.modules():
        for name, param in list(module._parameters.items()):
            if name == "weight" and module is on_meta.head:
                continue
            twin = param.data.to("meta")
            twin.__class__ = param.__class__
            twin.__dict__ = param.__dict__.copy()
            module._parameters[name] = twin
    on_meta.head.weight = on_meta.embed.weight
    assert record(on_meta, lambda pairs: on_meta.load_weights(pairs), PARAMS) == real


class Composed(nn.Module):
    """Copies its shard, then replaces it by a function of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.empty(4), requires_grad=False)


def test_a_composed_loader() -> None:
    def load(model: Composed, pairs: Pairs) -> None:
        for _, weight in pairs:
            default_loader(model.a_log, weight.narrow(0, 0, 4))
            model.a_log.data.copy_(-torch.exp(model.a_log.float()))

    recording = check_recording(Composed, load, [ParamMeta("mixer.A_log", "float32", (8,))])
    recording.require_coverage()
    assert recording.bytes_pulled == 16 and not recording.writes


class GatedInterleaved(nn.Module):
    """Gate and up rows alternate, transposed on the way, as some checkpoints store experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(2, 6, 8, dtype=torch.bfloat16), requires_grad=False)


def test_interleaved_and_transposed_experts() -> None:
    def load(model: GatedInterleaved, pairs: Pairs) -> None:
        for name, weight in pairs:  # [experts, hidden, inner]
            rows = weight.permute(0, 2, 1).contiguous()
            start = 0 if name == "gate" else 1
            for expert, row in enumerate(rows.unbind()):
                model.w13.data[expert, start::2].copy_(row)

    params = [ParamMeta(name, "bfloat16", (2, 8, 3)) for name in ("gate", "up")]
    recording = check_recording(GatedInterleaved, load, params)
    recording.require_coverage()


EXPERTS, INNER, HIDDEN = 4, 6, 5


class FusedExperts(nn.Module):
    """Experts of one rank, which the checkpoint holds in one tensor: gate and up, then down."""

    def __init__(self, rank: int, size: int, expert_parallel: bool, transposed: bool) -> None:
        super().__init__()
        self.rank, self.size, self.transposed = rank, size, transposed
        experts, inner = (EXPERTS // size, INNER) if expert_parallel else (EXPERTS, INNER // size)
        expert_map = torch.full((EXPERTS,), -1)
        local = torch.arange(experts)
        expert_map[local + rank * experts if expert_parallel else local] = local
        self.register_buffer("expert_map", expert_map)
        self.cut_inner = not expert_parallel
        w13, w2 = (experts, 2 * inner, HIDDEN), (experts, HIDDEN, inner)
        if transposed:  # as some kernels want them: the input dim first
            w13, w2 = (experts, HIDDEN, 2 * inner), (experts, inner, HIDDEN)
        self.w13 = nn.Parameter(torch.empty(w13, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(w2, dtype=torch.bfloat16), requires_grad=False)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            for expert in range(EXPERTS):
                if (local := self.expert_map[expert].item()) >= 0:
                    self.load_expert(name, weight[expert], local)

    def load_expert(self, name: str, weight: Tensor, local: int) -> None:
        into = (self.w13 if name == "gate_up" else self.w2).data[local]
        if self.transposed:
            into = into.t()
        if name == "gate_up":
            for half, own in zip(weight.chunk(2), into.chunk(2), strict=True):
                own.copy_(half.chunk(self.size)[self.rank] if self.cut_inner else half)
        else:
            into.copy_(weight.chunk(self.size, 1)[self.rank] if self.cut_inner else weight)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_experts_fused_in_the_checkpoint(
    rank: int, transposed: bool, expert_parallel: bool
) -> None:
    params = [
        ParamMeta("gate_up", "bfloat16", (EXPERTS, 2 * INNER, HIDDEN)),
        ParamMeta("down", "bfloat16", (EXPERTS, HIDDEN, INNER)),
    ]
    recording = check_recording(
        lambda: FusedExperts(rank, 2, expert_parallel, transposed), FusedExperts.load, params
    )
    recording.require_coverage()
    assert not recording.programs
    assert recording.bytes_pulled == sum(param.num_bytes for param in params) // 2


def test_rows_padded_to_a_multiple_of_64_stay_zero() -> None:
    """A hundred rows in 128: every sync leaves zeros below them, whatever was there."""

    def make() -> VocabEmbedding:
        model = VocabEmbedding(0, 1, 100, 4)
        model.weight.data = torch.full((128, 4), 7.0)
        return model

    def load(model: VocabEmbedding, pairs: Pairs) -> None:
        for _, weight in pairs:
            model.load(model.weight, weight)

    params = [ParamMeta("w", "bfloat16", (100, 4))]
    recording = check_recording(make, load, params)
    recording.require_coverage()
    (fill,) = recording.fills
    assert (fill.offset, fill.shape, fill.value) == (400, (112,), 0.0)
    replay(recording, model := make(), fetch_from(random_weights(params)))
    assert model.weight[:100].all() and not model.weight[100:].any()


def test_a_scale_that_is_loaded_several_times() -> None:
    """The last one stays where each overwrites it, the largest where each is compared."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_scale = nn.Parameter(torch.ones(1), requires_grad=False)
            self.input_scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def load(model: Fused, pairs: Pairs) -> None:
        model.input_scale.data.fill_(torch.finfo(torch.float32).min)
        for _, scale in pairs:
            model.weight_scale.data.copy_(scale)
            model.input_scale.data.copy_(torch.max(model.input_scale.data, scale))

    params = [ParamMeta(f"{name}.scale", "float32", ()) for name in "qkv"]
    recording = check_recording(Fused, load, params)
    recording.require_coverage()
    assert [write.slice.name for write in recording.placements] == ["v.scale"]
    assert recording.consumed == {"q.scale", "k.scale", "v.scale"}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, 2)
        self.up = nn.Linear(hidden, 3 * hidden)
        self.down = nn.Linear(3 * hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden)


def test_a_torch_model_with_load_state_dict() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 8), Block(8), Block(8), nn.Linear(8, 11))

    params = [
        ParamMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in make().state_dict().items()
    ]
    recording = check_recording(make, lambda m, pairs: m.load_state_dict(dict(pairs)), params)
    recording.require_coverage()
    assert recording.consumed == {param.name for param in params} and not recording.ignored
    assert len(recording.writes) == len(params)
