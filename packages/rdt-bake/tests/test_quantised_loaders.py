"""Miniatures of how quantised checkpoints are loaded, each against its own real load."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rdt_bake import DataDependentError, record
from rdt_bake.testing import check_recording
from rdt_plan import ParamMeta

Pairs = Iterable[tuple[str, Tensor]]

SHARDS = ("q", "k", "v")
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Fused(nn.Module):
    """Three layers in one, with a scale each for the weights, and one for the inputs of all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = empty(12, 8, dtype=torch.float8_e4m3fn)
        self.weight_scale = empty(3)
        self.input_scale = empty(1)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            shard, _, kind = name.partition(".")
            index = SHARDS.index(shard)
            if kind == "weight":
                self.weight.data.narrow(0, 4 * index, 4).copy_(weight)
            elif kind == "weight_scale":
                self.weight_scale.data[index].copy_(weight[0] if weight.dim() else weight)
            else:
                self.input_scale.data.copy_(weight.reshape(1))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_that_many_shards_load_into_one_parameter(shape: tuple[int, ...]) -> None:
    params = []
    for shard in SHARDS:
        params += [
            ParamMeta(f"{shard}.weight", "float8_e4m3fn", (4, 8)),
            ParamMeta(f"{shard}.weight_scale", "float32", shape),
            ParamMeta(f"{shard}.input_scale", "bfloat16", shape),
        ]

    recording = check_recording(Fused, Fused.load, params)

    # The last one's scale is what stays, so the others' need not be sent.
    assert {slice_.slice.name for slice_ in recording.placements} >= {"v.input_scale"}
    assert not {"q.input_scale", "k.input_scale"} & {
        placement.slice.name for placement in recording.placements
    }


class Experts(nn.Module):
    """Scales by number: two an expert for the first projections, one for their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = empty(2, 2)
        self.input_scale = nn.Parameter(torch.ones(2), requires_grad=False)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            expert, shard, kind = name.split(".")
            if kind == "scale":
                self.scale.data[int(expert)][int(shard)] = weight
            else:
                self.input_scale.data[int(expert)] = weight

    def load_and_compare(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            expert, _, kind = name.split(".")
            if kind == "input_scale":
                held = self.input_scale.data[int(expert)]
                if held != 1 and (held - weight).abs() > 1e-5:
                    raise ValueError("the scales of both inputs must be equal")
        self.load(pairs)


EXPERTS = [
    ParamMeta(f"{expert}.{shard}.{kind}", "float32", ())
    for expert in range(2)
    for shard in range(2)
    for kind in ("scale", "input_scale")
]


def test_scales_of_experts_are_set_one_by_one() -> None:
    check_recording(Experts, Experts.load, EXPERTS)


def test_a_loader_that_compares_scales_is_refused_by_name() -> None:
    """Whether it raises is up to the values, and a recording has none."""
    model = Experts()
    with pytest.raises(DataDependentError, match="test_quantised_loaders") as caught:
        record(model, model.load_and_compare, EXPERTS)
    assert caught.value.weight == "0.0.input_scale"


class Packed(nn.Module):
    """Half of each packed tensor, in the bytes of another dtype, turned over, and looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.nibbles = empty(8, 8, dtype=torch.uint8)
        self.exponents = empty(8, 2, dtype=torch.uint8)
        self.turned = empty(4, 4, dtype=torch.int32)
        self.zeros = empty(2, 1, dtype=torch.int32)
        self.unpacked = empty(8, 4, dtype=torch.uint8)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            if name == "blocks":  # (rows, blocks, bytes): rows of bytes
                self.nibbles.data.copy_(weight.view(8, 2, 8).reshape(8, -1)[:, :8])
            elif name == "scales":
                self.exponents.data.copy_(weight.view(torch.uint8))
            elif name == "qweight":
                self.turned.data.copy_(weight.t().contiguous().narrow(0, 4, 4))
            elif name == "qzeros":
                self.zeros.data.copy_(weight.narrow(1, 1, 1))
            else:  # bytes of an int32, each cut into its two halves
                values = weight.T.contiguous().view(torch.uint8)
                halves = torch.stack([values & 0xF, (values >> 4) & 0xF], dim=-1)
                self.unpacked.data.copy_(halves.view(4, -1)[:, :8].T)


def test_packed_bytes_are_viewed_turned_and_cut_up() -> None:
    params = [
        ParamMeta("blocks", "uint8", (8, 2, 8)),
        ParamMeta("scales", "float8_e8m0fnu", (8, 2)),
        ParamMeta("qweight", "int32", (4, 8)),
        ParamMeta("qzeros", "int32", (2, 2)),
        ParamMeta("packed", "int32", (2, 4)),
    ]
    recording = check_recording(Packed, Packed.load, params)
    assert [program.module for program in recording.programs] == [""]  # what is computed alone


class Turned(nn.Module):
    """An expert's packed weight, unpacked, put into another order, turned over and packed again.

    It is moved first, to a device that the loader names itself: the one that the model is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = empty(2, 8, 2, dtype=torch.uint8)
        self.scales = empty(2, 8, 2)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            expert, _, kind = name.partition(".")
            weight = weight.to(torch.device("cpu"))
            if kind == "scales":
                self.scales.data[int(expert)].copy_(weight.T.repeat_interleave(2, 1).cpu())
                continue
            shifts = torch.tensor([0, 4], dtype=torch.uint8, device=weight.device)
            nibbles = (weight.view(torch.uint8)[:, :, None] >> shifts) & 0xF
            nibbles = nibbles.view(-1, 8)[:, ORDER].view(weight.shape[0], -1).T.contiguous()
            self.weight.data[int(expert)] = nibbles[:, 1::2] * 16 + nibbles[:, ::2]


def test_a_weight_that_is_moved_first_is_followed() -> None:
    params = [ParamMeta(f"{e}.qweight", "int32", (4, 1)) for e in range(2)]
    params += [ParamMeta(f"{e}.scales", "bfloat16", (1, 8)) for e in range(2)]
    recording = check_recording(Turned, Turned.load, params)
    assert recording.consumed == {meta.name for meta in params}


class Discarded(nn.Module):
    """A scale that serves is a buffer; the parameter that loads it is taken away before serving."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.ones(()))
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.v_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    def load(self, pairs: Pairs) -> None:
        for name, weight in pairs:
            param = self.get_parameter(name.rpartition(".")[2])
            param.data.copy_(weight.reshape(()))


def test_scales_of_a_cache_land_in_parameters_without_dimensions() -> None:
    params = [
        ParamMeta("k_proj.k_scale", "float32", (1,)),
        ParamMeta("v_proj.v_scale", "bfloat16", ()),
    ]
    recording = check_recording(Discarded, Discarded.load, params)
    assert recording.uncovered == ()
