import operator

import pytest
import torch
from torch import nn

from rdt_plan.dtypes import ITEM_BYTES
from rdt_vllm.errors import InstallError
from rdt_vllm.module_tensors import ModuleTensors, copy_all, keeping_addresses, own_tensors
from rdt_vllm.testing.bits import to_bytes

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def layer() -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    module.register_parameter("bias", None)
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    module.register_buffer("table", torch.zeros(3), persistent=False)
    module.register_buffer("count", torch.zeros(1))
    module.packed = torch.ones(4)
    return module


def test_own_tensors_leave_out_what_is_none_and_what_children_own() -> None:
    module = layer()
    module.child = layer()

    assert list(own_tensors(module)) == ["weight", "scale", "table", "count"]


def test_put_back_restores_objects_order_persistence_and_hidden_attributes() -> None:
    module = layer()
    parameters, buffers = list(module._parameters.items()), list(module._buffers.items())
    containers = module._parameters, module._buffers, module._non_persistent_buffers_set
    packed = module.packed
    kept = ModuleTensors.of(module, frozenset({"packed", "weight"}))

    for name in ("weight", "scale", "table", "packed"):
        delattr(module, name)
    module.register_buffer("table", torch.ones(9))
    module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    module.register_parameter("packed", nn.Parameter(torch.zeros(1)))
    module.__dict__["table"] = module.__dict__["scale"] = torch.zeros(5)
    kept.put_back()

    assert [(k, id(v)) for k, v in module._parameters.items()] == [
        (k, id(v)) for k, v in parameters
    ]
    assert [(k, id(v)) for k, v in module._buffers.items()] == [(k, id(v)) for k, v in buffers]
    assert module._parameters is containers[0]
    assert module._buffers is containers[1]
    assert module._non_persistent_buffers_set is containers[2]
    assert module._non_persistent_buffers_set == {"table"}
    assert module.packed is packed
    assert module.scale is parameters[2][1]
    assert module.table is buffers[0][1]


def test_a_module_is_in_place_until_a_tensor_is_replaced_moved_or_added() -> None:
    module = layer()
    kept = ModuleTensors.of(module)
    module.scale.data.zero_()
    module.packed = torch.zeros(1)
    assert kept.is_in_place()

    for name in ("scale", "count"):
        setattr(module, name, getattr(layer(), name))
        assert not kept.is_in_place()
        kept.put_back()
        assert kept.is_in_place()
    module.register_buffer("another", None)
    assert not kept.is_in_place()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_all_pairs_are_copied_whatever_their_dtypes_and_strides(device: str) -> None:
    """Bit for bit, into parameters that want a gradient and of a class of its own as well."""
    pairs, expected = [], []
    for name, item in ITEM_BYTES.items() - {("complex32", 4)}:  # of which torch warns
        dtype = getattr(torch, name)
        for shape in ((), (0,), (1,), (5, 3), (64, 1000)):
            drawn = torch.randint(0, 2, (*shape, item), dtype=torch.uint8)  # no bool is 2
            source, target = (
                each.view(dtype).reshape(shape).to(device)
                for each in (drawn, torch.zeros_like(drawn))
            )
            if len(shape) == 2 and not name.startswith("float4"):  # torch makes no such copies
                other = torch.zeros(shape[1], shape[0] * item, dtype=torch.uint8).view(dtype)
                target = other.to(device).t()
            pairs.append((target, source))
            expected.append(drawn)
    wants = nn.Parameter(torch.zeros(4, device=device))
    pairs.append((wants, torch.ones(4, device=device)))
    expected.append(torch.ones(4))

    with torch.inference_mode():  # what the first forward made
        made = [torch.zeros(shape, device=device) for shape in ((4,), (2 << 20,))]
    for target in made:
        pairs.append((target, torch.ones(target.shape, device=device)))
        expected.append(torch.ones(target.shape))

    copy_all(pairs)

    for (target, _), drawn in zip(pairs, expected, strict=True):
        assert torch.equal(to_bytes(target).cpu(), to_bytes(drawn)), target.dtype


def test_what_is_computed_anew_is_copied_to_where_it_was() -> None:
    module = layer()
    old = module.packed, module.weight, module.table
    with keeping_addresses("m", vars(module), module._parameters, module._buffers):
        module.packed = torch.arange(4.0)
        module.weight = nn.Parameter(torch.arange(4.0).view(2, 2), requires_grad=False)
        module.table.fill_(5)
        module.late = torch.zeros(1)
        module.scale = None

    assert all(map(operator.is_, (module.packed, module.weight, module.table), old))
    assert module.packed.tolist() == [0, 1, 2, 3]
    assert module.weight.tolist() == [[0, 1], [2, 3]]
    assert module.table.tolist() == [5, 5, 5]
    assert module.scale is None


def test_what_no_longer_fits_where_it_was_is_named() -> None:
    module = layer()
    with pytest.raises(InstallError, match=r"m\.packed: expected \(4,\).*found \(5,\)"):
        with keeping_addresses("m", vars(module)):
            module.packed = torch.zeros(5)


@pytest.mark.parametrize("fits", [True, False])
def test_where_it_fails_everything_is_where_it_was(fits: bool) -> None:
    module = layer()
    held = [vars(module), module._parameters, module._buffers]
    before = [(each, name, t) for each in held for name, t in each.items() if torch.is_tensor(t)]
    with pytest.raises(RuntimeError if fits else InstallError):
        with keeping_addresses("m", *held):
            module.weight = nn.Parameter(torch.zeros(2, 2))
            module.scale = None
            module.packed = torch.zeros(4 if fits else 5)
            if fits:
                raise RuntimeError("the kernel is missing")

    assert len(before) == 5
    assert all(holder[name] is tensor for holder, name, tensor in before)
    assert module.packed.tolist() == [1, 1, 1, 1]
    assert module.weight.tolist() == [[1, 1], [1, 1]]
